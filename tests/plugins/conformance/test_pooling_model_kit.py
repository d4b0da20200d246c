"""The kit of pooled models: families in the box pass it, and planted bugs do not."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.plugins.conformance.pooling_models import PoolingModelKit
from jackfield.plugins.models.bert import BertForSequenceClassification, BertModel


class TestRobertaClassifier(PoolingModelKit):
    name = "RobertaForSequenceClassification"
    config = {"pad_token_id": 1, "type_vocab_size": 1}


class TestQwen3Vectors(PoolingModelKit):
    """A decoder, whose prompts are cached."""

    name = "Qwen3Model"
    reference = transformers.Qwen3Model


class Kit(PoolingModelKit):
    name = "BertModel"
    reference = transformers.BertModel
    plugin = plugin_of("model", "BertModel", BertModel)


class ClassifierKit(PoolingModelKit):
    name = "BertForSequenceClassification"
    plugin = plugin_of("model", "BertForSequenceClassification", BertForSequenceClassification)


EQUAL = "test_numbers_equal_the_reference"
BESIDE = "test_what_else_is_in_the_batch_changes_nothing"
DTYPES = "test_every_dtype_is_as_near_as_the_reference"
WHOLE = "test_a_whole_vector_is_pooled_from_the_states"


def forward(change: Any, model: type = BertModel) -> type:
    def changed(self: Any, input_ids: torch.Tensor, context: Any) -> torch.Tensor:
        return change(self, model.forward(self, input_ids, context), context)  # type: ignore[attr-defined]

    return subclass(model, forward=changed)


def logits(change: Any) -> type:
    def changed(self: Any, pooled: torch.Tensor) -> torch.Tensor:
        return change(BertForSequenceClassification.classify(self, pooled))

    return subclass(BertForSequenceClassification, classify=changed)


def keeps_the_first(self: Any, hidden: torch.Tensor, context: Any) -> torch.Tensor:
    if not hasattr(self, "first"):
        self.first = hidden[:1].clone()
    return hidden + 0.1 * self.first


def lost_in_half(self: Any, hidden: torch.Tensor, context: Any) -> torch.Tensor:
    return hidden if hidden.dtype == torch.float32 else hidden * 1.1


MUTANTS = {
    "rows of a step mix": Mutant(
        forward(lambda self, hidden, context: hidden + 0.01 * hidden.mean(0)),
        (BESIDE, EQUAL, DTYPES), perhaps=(WHOLE,),
    ),
    "the last layer's scale": Mutant(
        forward(lambda self, hidden, context: hidden * 1.01), (EQUAL,), perhaps=(DTYPES,)
    ),
    "keeps the first request's": Mutant(
        forward(keeps_the_first), (EQUAL, DTYPES), perhaps=(WHOLE, BESIDE)
    ),
    "wrong in half precision alone": Mutant(forward(lost_in_half), (DTYPES,)),
    "positions begin at one": Mutant(
        forward(lambda self, hidden, context: hidden.roll(1, 0)),
        (EQUAL, BESIDE, DTYPES), perhaps=(WHOLE,),
    ),
    "states are normed once more": Mutant(
        subclass(BertModel, pooling_states=lambda self, hidden: hidden / hidden.norm(dim=-1,
                 keepdim=True)),
        (EQUAL, DTYPES),
    ),
    "tokens know what comes before alone": Mutant(
        forward(lambda self, hidden, context: hidden.cumsum(0) / len(hidden)),
        (EQUAL, BESIDE, DTYPES), perhaps=(WHOLE,),
    ),
    "a row adds up": Mutant(
        subclass(BertModel, pooling_states=lambda self, hidden: hidden + hidden.mean()),
        (EQUAL, DTYPES), perhaps=(BESIDE, WHOLE),
    ),
}  # fmt: skip
CLASSIFIER_MUTANTS = {
    "labels in another order": Mutant(logits(lambda x: x.flip(-1)), (EQUAL, DTYPES)),
    "softmax already": Mutant(logits(lambda x: x.softmax(-1)), (EQUAL, DTYPES)),
    "rows of a batch in one": Mutant(
        logits(lambda x: x + x.mean(0) * 0.01), (EQUAL,), perhaps=(BESIDE, DTYPES)
    ),
    "the first row for all": Mutant(logits(lambda x: x[:1].expand_as(x)), (BESIDE,),
                                    perhaps=(EQUAL, DTYPES)),
    "one label's bias": Mutant(
        logits(lambda x: torch.cat([x[:, :1] + 0.05, x[:, 1:]], -1)), (EQUAL,), perhaps=(DTYPES,)
    ),
    "half precision": Mutant(
        logits(lambda x: x if x.dtype == torch.float32 else x * 1.2), (DTYPES,)
    ),
    "centered": Mutant(logits(lambda x: x - x.mean(-1, keepdim=True)), (EQUAL, DTYPES)),
    "twice": Mutant(logits(lambda x: 2 * x), (EQUAL, DTYPES)),
}  # fmt: skip

TestMutants = mutant_tests(Kit, MUTANTS)
TestClassifierMutants = mutant_tests(ClassifierKit, CLASSIFIER_MUTANTS)
