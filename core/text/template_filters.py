"""Filters, tests and methods of text that templates may use, with bounds for what they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import pass_environment
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter

from .control_tokens import MARK
from .template_budget import built, check_size, count_input, current_budget, in_full, is_sized

if TYPE_CHECKING:
    from .template_sandbox import TemplateEnvironment

_MAX_PADDING = 10_000
_MAX_SLOW = 1 << 16
_SHALLOW_FILTERS = frozenset(
    {
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
    }
)
"""Filters that do not read their value's items; tests and filters applied to items count
themselves."""
_SLOW_FILTERS = frozenset(
    {
        "e",
        "escape",
        "forceescape",
        "pprint",
        "striptags",
        "title",
        "truncate",
        "urlencode",
        "wordcount",
        "wordwrap",
        "xmlattr",
    }
)
"""Filters limited to `_MAX_SLOW` characters: regular expressions, and loops over slices."""
_DEEP_TESTS = frozenset(
    {
        "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le",
        "lessthan", "lower", "lt", "ne", "upper",
    }
)  # fmt: skip
"""Tests that read into their values."""
_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})


def check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse str methods whose result would exceed the bounds."""
    if name in _PADDING_METHODS:
        numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, int)]
        if any(number > _MAX_PADDING for number in numbers):
            raise SecurityError(f"it pads to more than {_MAX_PADDING} characters")
        check_size(len(owner) * (max(numbers, default=8) if name == "expandtabs" else 1))
    elif name == "replace" and len(args) >= 2:
        _check_replace(owner, args[0], args[1])
    elif name == "translate" and args:
        values = args[0].values() if isinstance(args[0], Mapping) else args[0]
        check_size(len(owner) * max((len(v) for v in values if is_sized(v)), default=1))
    elif name in ("format", "format_map"):
        check_size(len(owner) + owner.count("{") * count_input(*args, *kwargs.values()))
    elif name == "join" and args and is_sized(args[0]):
        check_size(len(owner) * len(args[0]) + sum(len(v) for v in args[0] if is_sized(v)))


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        check_size(len(text) + text.count(old) * (len(new) - len(old)))


def refuse_wide_format(text: str) -> None:
    """Refuse format texts with a computed width, or one of five or more digits."""
    run = 0
    for char in text:
        run = run + 1 if char.isdigit() else 0
        if run > 4:
            raise SecurityError("it formats to a width of five digits or more")
    if "*" in text or "{" in text.partition("{")[2].partition("}")[0]:
        raise SecurityError("it formats to a computed width")


def bounded_filter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter to count its input and output, and bound its result beforehand."""

    def limited(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        budget.spend()
        if name in _SHALLOW_FILTERS:
            budget.spend(sum(len(arg) for arg in args if is_sized(arg)) >> 4)
        else:
            args = tuple(in_full(arg) for arg in args)
            kwargs = {key: in_full(value) for key, value in kwargs.items()}
            if count_input(*args, *kwargs.values()) > _MAX_SLOW and name in _SLOW_FILTERS:
                raise SecurityError(f"{name} takes at most {_MAX_SLOW} characters")
        _check_filter(name, args, kwargs)
        result = original(*args, **kwargs)
        return result if any(result is arg for arg in args) else built(result)

    return _with_marks(limited, original)


def _check_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that make a result too long."""
    values = [*args, *kwargs.values()]
    texts = [value for value in values if isinstance(value, str)]
    numbers = [abs(value) for value in values if isinstance(value, int)]
    if name == "replace" and len(texts) >= 3:
        _check_replace(texts[0], texts[1], texts[2])
    elif name == "join":
        items: Any = next((v for v in args if isinstance(v, list | tuple | dict)), ())
        check_size(len(items) * max((len(text) for text in texts), default=0))
    elif name == "format" and texts:
        refuse_wide_format(texts[0])
        check_size(len(texts[0]) + sum(map(len, texts[1:])) * texts[0].count("%"))
    elif name in ("slice", "batch", "round") and max(numbers, default=0) > _MAX_PADDING:
        raise SecurityError(f"it cuts or rounds to more than {_MAX_PADDING}")
    elif name in ("center", "indent"):
        if max(numbers, default=0) > _MAX_PADDING:
            raise SecurityError(f"it pads to more than {_MAX_PADDING} characters")
        width = max([4, *numbers, *(len(text) for text in texts[1:])])
        if texts:
            check_size(len(texts[0]) + (texts[0].count("\n") + 1) * width)
    elif name == "wordwrap" and texts:
        check_size(len(texts[0]) * max(map(len, texts)))


def counted_test(name: str, original: Any) -> Callable[..., Any]:
    """Wrap a test to count itself and its input."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        current_budget.get().spend()
        if name in _DEEP_TESTS:
            count_input(*args, *kwargs.values())
        return original(*args, **kwargs)

    return _with_marks(counted, original)


def _with_marks(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Copy Jinja's marks of implicit arguments."""
    for attribute in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(original, attribute):
            setattr(wrapper, attribute, getattr(original, attribute))
    return wrapper


@pass_environment
def sum_items(
    environment: TemplateEnvironment, value: Any, attribute: Any = None, start: Any = 0
) -> Any:
    """Return the sum of items; Python's blocks the interpreter, and copies lists."""
    get = (lambda item: item) if attribute is None else make_attrgetter(environment, attribute)
    for item in value:
        start = environment.call_binop(None, "+", start, get(item))
    return start


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, as in transformers' templates."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    marks = None if separators is None else tuple(map(str, separators))
    longest = max(map(len, marks or ()), default=0)
    if width > 100 or longest > 100:
        raise SecurityError("it indents by more than 100")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=marks,  # type: ignore[arg-type]
        sort_keys=sort_keys,
    )
    if indent is None and longest < 4:
        text = encoder.encode(value)
    else:
        pieces, size = [], 0
        for piece in encoder.iterencode(value):
            size += len(piece)
            check_size(size)
            pieces.append(piece)
        text = "".join(pieces)
    return text.replace(json.dumps(MARK)[1:-1], MARK) if ensure_ascii else text


def json_or_text(text: str) -> Any:
    """Return a JSON text's value, else the text, for checkpoint formats whose tool results may be
    either.
    """
    try:
        value = json.loads(text)
        count_input(value)
        return value
    except (ValueError, RecursionError):
        return text
