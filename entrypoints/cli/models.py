"""`jackfield pull`, `list`, `rm` and `alias`: models by name on this machine."""

from __future__ import annotations

import argparse
import sys

import msgspec

from ...core.config.model_names import HubName, local_or_hub_name
from ...core.errors import CheckpointNotFound, ConfigError, JackfieldError, shown
from ..flags.engine_flags import add_hf_token, fail, set_hf_token
from ..flags.parser import Parser
from ..models import object_store
from ..models.aliases import read_aliases, remove_alias, set_alias
from ..models.inventory import remove_model, size_text, stored_models


def run_pull(argv: list[str]) -> int:
    parser = Parser(
        prog="jackfield pull",
        description="Fetch a checkpoint, so that it can be served without a network: from the "
        "Hugging Face hub (or the mirror that HF_ENDPOINT names), or from an object store "
        "(s3://, gs://). What is there already is kept, downloads that broke off go on, and "
        "digests are checked. Prints the folder.",
    )
    parser.add_argument("model", help="owner/name, owner/name@revision, s3://…, gs://…, an alias")
    parser.add_argument("--revision", help="branch, tag or commit, as after @")
    parser.add_argument("--alias", metavar="NAME", help="a name of one's own for it")
    _add_folder(parser)
    add_hf_token(parser)
    args = parser.parse_args(argv)
    set_hf_token(args)
    try:
        model = read_aliases().get(args.model, args.model)
        print(_pull(model, args.revision, args.download_dir))
        if args.alias is not None:
            has_revision = args.revision is None or model.endswith(f"@{args.revision}")
            set_alias(args.alias, model if has_revision else f"{model}@{args.revision}")
    except (JackfieldError, OSError) as error:
        return fail(error)
    return 0


def _pull(model: str, revision: str | None, download_dir: str | None) -> str:
    from ...core.loading.hub import CHECKPOINT_FILES, TOKENIZER_FILES, fetch_snapshot

    if object_store.is_url(model):
        if revision is not None:
            raise ConfigError("--revision: an object store has none")
        return str(object_store.fetch(model, download_dir))
    name = local_or_hub_name(model, "model")
    if not isinstance(name, HubName):
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ConfigError(f"pull: {shown(model)} is no name on a hub (owner/name)")
        name = HubName(name, None)
    if revision is not None and name.revision not in (None, revision):
        raise ConfigError(f"--revision: {shown(model)} names another one")
    files = sorted({*CHECKPOINT_FILES, *TOKENIZER_FILES})
    try:
        folder = fetch_snapshot(
            name.repo, name.revision or revision, files, download_dir=download_dir, check_all=True
        )
    except JackfieldError:
        raise
    except Exception as error:  # Those of huggingface_hub, and of its HTTP client.
        raise CheckpointNotFound(
            f"pull: {shown(model)} cannot be fetched ({type(error).__name__}: {error})"
        ) from error
    return str(folder)


def run_list(argv: list[str]) -> int:
    parser = Parser(
        prog="jackfield list",
        description="List the models on this machine: those in the hub's cache, copies from object "
        "stores, and aliases.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    _add_folder(parser)
    args = parser.parse_args(argv)
    try:
        models, aliases = stored_models(args.download_dir), read_aliases()
    except (JackfieldError, OSError) as error:
        return fail(error)
    if args.json:
        everything = {"models": models, "aliases": aliases}
        print(msgspec.json.format(msgspec.json.encode(everything)).decode())
        return 0
    rows = [("model", "revision", "size", "aliases")]
    rows += [
        (
            each.name,
            ", ".join(filter(None, (*each.refs, each.revision[:12]))),
            size_text(each.num_bytes) + ("" if each.complete else " (not whole)"),
            ", ".join(each.aliases),
        )
        for each in models
    ]
    named = {alias for each in models for alias in each.aliases}
    rows += [(model, "", "", alias) for alias, model in aliases.items() if alias not in named]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{text:{width}}" for text, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def run_rm(argv: list[str]) -> int:
    parser = Parser(
        prog="jackfield rm",
        description="Remove models that were fetched by name, or aliases.",
    )
    parser.add_argument(
        "model", nargs="+", help="owner/name, owner/name@revision, s3://…, gs://…, an alias"
    )
    _add_folder(parser)
    args = parser.parse_args(argv)
    try:
        for name in args.model:
            print(remove_model(name, args.download_dir))
    except (JackfieldError, OSError) as error:
        return fail(error)
    return 0


def run_alias(argv: list[str]) -> int:
    parser = Parser(
        prog="jackfield alias",
        description="Give a model a name of one's own, which `serve` and the other commands take, "
        "and requests then use. Without MODEL, print what an alias means.",
    )
    parser.add_argument("name", help="letters, digits, '.', ':', '_' and '-'")
    parser.add_argument("model", nargs="?", help="a folder, a hub name, or an object store's URL")
    parser.add_argument("--remove", action="store_true", help="forget it; the model stays")
    args = parser.parse_args(argv)
    try:
        return _alias(args)
    except (JackfieldError, OSError) as error:
        return fail(error)


def _alias(args: argparse.Namespace) -> int:
    if args.remove:
        if not remove_alias(args.name):
            raise ConfigError(f"alias: there is no {shown(args.name)}")
    elif args.model is not None:
        if not object_store.is_url(args.model):
            local_or_hub_name(args.model, "model")
        set_alias(args.name, args.model)
    elif (model := read_aliases().get(args.name)) is not None:
        print(model)
    else:
        print(f"jackfield: alias: there is no {shown(args.name)}", file=sys.stderr)
        return 1
    return 0


def _add_folder(parser: Parser) -> None:
    parser.add_argument(
        "--download-dir", metavar="PATH", help="folder of what is fetched (default: HF_HUB_CACHE)"
    )
