"""Versions of the hooks: which one this is, and what each has changed.

A plugin states the `API_VERSION` that it was written for as `jackfield_api`. The version is raised
when a hook or a protocol changes so that plugins must change, too; a new hook, or a new method that
a plugin may have, does not raise it.

A plugin for an older version runs if it implements none of the hooks that have changed since
(`CHANGED_HOOKS`); otherwise, and for a newer version, it is skipped, with a message in the log. One
without `jackfield_api` counts as written for version 1, so that no plugin runs against a contract
that its author has not seen. The same message is logged for a plugin that states another version
and fails to import here (it may use names of that version): the version is then read from its
source.

docs/reference/api-versions.md says how a plugin changes from one version to the next.
"""

from __future__ import annotations

API_VERSION = 3
"""The hook API version, which plugins state as `jackfield_api`."""
CHANGED_HOOKS: dict[int, tuple[str, ...]] = {
    2: (
        "register_models",
        "register_operations",
        "register_executors",
        "register_kv_connectors",
        "step_finished",
    ),
    3: ("register_executors", "step_finished"),
}
"""Version → the hooks that it has changed, themselves or the contract of what they register."""
