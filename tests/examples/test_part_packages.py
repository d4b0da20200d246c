"""The outside packages with parts, as if installed: in this process, and in a rank's.

Each package's tests are all run nightly, in an environment of its own (test_outside_packages.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import forked
import pytest
from outside import ROOT

from jackfield.core.remote import processes as remote_processes

PLUGINS = ROOT / "examples/plugins"


def loaded(package: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, PLUGINS / package / f"tests/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


budget = loaded("jackfield-token-budget", "test_budget")
watch = loaded("jackfield-activation-watch", "test_watch")


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both packages, as pip would have them; ranks are forked."""
    folder = tmp_path_factory.mktemp("packages")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("token_budget", "activation_watch"):
            distribution = f"jackfield-{name.replace('_', '-')}"
            info = folder / f"jackfield_{name}-0.1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\n"
            )
            (info / "entry_points.txt").write_text(f"[jackfield]\n{name} = jackfield_{name}\n")
            patch.syspath_prepend(PLUGINS / distribution / "src")
        patch.syspath_prepend(folder)
        with forked.processes_of(remote_processes):
            yield


two_heads = watch.two_heads
test_a_group_gets_its_budget = budget.test_a_group_gets_its_budget_and_no_token_more
test_aborted_members_have_used_what_they_got = budget.test_aborted_members_have_used_what_they_got
test_other_budgets_are_refused_by_name = budget.test_other_values_are_refused_by_name
test_large_activations_end_their_request = watch.test_large_activations_end_their_request_alone
test_tokens_are_only_counted = watch.test_tokens_are_only_counted_where_that_is_asked_for
test_other_limits_are_refused_by_name = watch.test_other_limits_are_refused_by_name
test_it_is_refused_with_stages = watch.test_it_is_refused_with_stages
