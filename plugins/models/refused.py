"""Unsupported architectures of `transformers`, by reason."""

from __future__ import annotations

STATE = "it keeps a state of each sequence instead of keys and values, or beside them"
EXPERTS = "its mixture of experts is chosen or shared in a way that is not there yet"
LATENT_SINKS = "its latent attention has sinks, and its layers hyper-connections"
LATENT_WINDOWS = "some layers' latent attention has windows and sizes of its own"
ENCODER = "it is an encoder by training: Jackfield serves encoders for vectors and labels"
CROSS = "it is the decoder of an encoder-decoder model, and attends to the encoder's states"
SPARSE_ENCODER = "its encoder attends to windows or blocks of its input"
IMAGES = "it takes images, sound or video beside text"
REFUSED = {
    STATE: (
        "RecurrentGemmaForCausalLM", "RwkvForCausalLM",
        "xLSTMForCausalLM",
    ),
    EXPERTS: (
        "NllbMoeForConditionalGeneration", "SwitchTransformersForConditionalGeneration",
    ),
    LATENT_SINKS: ("HYV4ForCausalLM",),
    LATENT_WINDOWS: ("Dots3NoteForCausalLM",),
    ENCODER: (
        "BertGenerationDecoder", "BertLMHeadModel", "BigBirdForCausalLM", "CamembertForCausalLM",
        "Data2VecTextForCausalLM", "ElectraForCausalLM", "ErnieForCausalLM",
        "MegatronBertForCausalLM", "RemBertForCausalLM", "RoCBertForCausalLM",
        "RoFormerForCausalLM", "RobertaForCausalLM", "RobertaPreLayerNormForCausalLM",
        "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM", "XLMWithLMHeadModel",
        "XmodForCausalLM",
    ),
    CROSS: (
        "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM",
        "BlenderbotSmallForCausalLM", "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM",
        "MusicgenForCausalLM", "MusicgenMelodyForCausalLM", "PLBartForCausalLM",
        "PegasusForCausalLM", "ProphetNetForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM",
    ),
    SPARSE_ENCODER: (
        "BigBirdPegasusForConditionalGeneration", "LEDForConditionalGeneration",
        "LongT5ForConditionalGeneration", "PegasusXForConditionalGeneration",
    ),
    "encoder and decoder have separate vocabularies": ("FSMTForConditionalGeneration",),
    "it predicts several tokens at once": ("ProphetNetForConditionalGeneration",),
    "encoder and decoder are models of any two families": ("EncoderDecoderModel",),
    "encoder and decoder rotate, which the parts of encoder-decoder models do not": (
        "T5GemmaForConditionalGeneration",
    ),
    IMAGES: (
        "CohereCompassForCausalLM",
        "FuyuForCausalLM",
        "GitForCausalLM",
        "GraniteSpeechPlusForConditionalGeneration",
        "MiniMaxM3VLForCausalLM", "MllamaForCausalLM", "MoshiForCausalLM",
        "MossTranscribeDiarizeForConditionalGeneration", "MusicFlamingoForConditionalGeneration",
        "Nemotron3_5TranscribeForConditionalGeneration", "OmniASRForConditionalGeneration",
        "SeamlessM4TForTextToText", "SeamlessM4Tv2ForTextToText",
        "T5Gemma2ForConditionalGeneration", "VibeVoiceAsrForConditionalGeneration",
        "VoxtralRealtimeForConditionalGeneration",
    ),
    "it reads pictures by code that only its checkpoint has": (
        "DeepseekVLV2ForCausalLM",
    ),
    "its experts are chosen by whether a token is text or a picture's": (
        "Ernie4_5_VLMoeForConditionalGeneration",
    ),
    "some of its layers attend to the states of a picture": ("MllamaForConditionalGeneration",),
    "it drafts tokens for another model": (
        "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM",
    ),
    "its scores have a learned bias by distance, and its keys a convolution": (
        "Inkling2ForCausalLM", "Inkling2LoopForCausalLM", "InklingForCausalLM",
        "InklingForConditionalGeneration",
    ),
    "its attention reads keys that an index chooses, over several residual streams": (
        "DeepseekV4ForCausalLM", "Qwen4ExpForCausalLM",
    ),
    "its attention keeps only some of the keys, by a learned mask": ("DogeForCausalLM",),
    "its attention reads learned keys and values before those of each text": (
        "PanguProMoEV2ForCausalLM",
    ),
    "it reads bytes, in patches of several": ("BltForCausalLM",),
    "it attends by hashes of tokens": ("ReformerModelWithLMHead",),
    "it predicts tokens in permuted orders": ("XLNetLMHeadModel",),
    "a prompt attends to later tokens": ("CpmAntForCausalLM",),
    "the package jackfield-stablelm (examples/plugins/jackfield-stablelm) registers it": (
        "StableLmForCausalLM",
    ),
    "its checkpoints have been published again under StableLmForCausalLM": (
        "StableLMEpochForCausalLM",
    ),
    "its weights are in files that fairseq2 writes, which no loader reads": (
        "Fairseq2LlamaForCausalLM",
    ),
}  # fmt: skip
"""Reason, as one clause → names. Others run on transformers' modules (`plugins/models/fallback/`),
if possible."""
ELSEWHERE = (
    "DeepseekVLV2ForCausalLM",
    "Ernie4_5_VLMoeForConditionalGeneration", "MllamaForConditionalGeneration",
    "Fairseq2LlamaForCausalLM", "InklingForConditionalGeneration",
    "PanguProMoEV2ForCausalLM",
    "StableLMEpochForCausalLM",
)  # fmt: skip
"""Those that other engines serve, and that `transformers` does not list as generative."""
