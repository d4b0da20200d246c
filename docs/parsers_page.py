"""docs/reference/parsers.md: the parsers of model output in the box."""

from __future__ import annotations

import inspect

from markdown_table import table

from jackfield.core import hooks
from jackfield.core.registry import load_plugins

_CHOICE = """\
A checkpoint may say which ones its model needs, in a file `jackfield.json` beside its config.json:

```json
{"tool_call_parser": "hermes", "reasoning_parser": "think_tags"}
```

A flag counts more than that, and `none` switches a parser off. With `auto`, a checkpoint that names
none gets the parser whose marks its chat template has, for one of the model types in brackets if
there are any (the column "auto"); the line that the server prints when it is ready says which, and
the log, at `--log-level info`, why. Where no parser's marks are there and the
checkpoint's tokenizer_config.json has a `response_template`, `auto` takes `hf`, which
[goes by that](#response-templates). With `"calls_without_tools": true`, calls
that the model makes where a request offers no tools are calls in the answer, too, instead of text:
the embedded model does so.
"""

_TOOL_PARSERS = """\
Calls stream as they are written: first the name, then the arguments, piece by piece; calls of
`beam`, `dots`, `hf`, `k2_horizon`, `minicpm5`, `minimax_m3` and `spark25` when they are complete.
Where a format writes arguments as plain text, the request's schema says what type each one has.

What a client gets of output that keeps to no format is the same for all of them, whole or streamed:

- The arguments of a call that is complete are valid JSON.
- A call that breaks off, or that `max_tokens` cuts off, is in the answer with its name and the
  arguments up to there: the beginning of a JSON object, which may be empty. `json.loads` refuses
  it; tell the model so, as with any wrong call.
- What is left of a call that broke off is dropped: up to its closing mark, the mark that opens the
  next call, or the end. In a format without closing marks it is content.
- Once a call has begun, none of its format's marks is shown, neither in the content nor in
  arguments. A string may still quote a mark: it ends the call unless the string goes on to its
  closing quote, and JSON after that (looked for within 512 characters).
- What stands where a call begins and has no name is no call: it is content as it stands.
- Where arguments stand in tags of their own, a forgotten tag costs at most its own argument.
- Text in reasoning that no reasoning parser takes out is read like any other, but for
  `hunyuan_a13b`, `minimax` and `seed_oss`: calls in there are content."""

_REASONING_PARSERS = """\
Where the chat template writes the mark that opens the reasoning, or closes it, at the end of the
prompt, the parsers whose reasoning stands between marks go by that.

Whether a request reasons is the chat template's matter: `chat_template_kwargs` with
`enable_thinking` (off by default for `gemma4` and `poolside_v1`); `thinking` for `deepseek_v3` and
`granite`, where it is off by default, and for `deepseek_v4`, `deepseek_v41`, `holo2`, `kimi_k2` and
`kimi_k3`, where it is on; `reasoning` for `cohere_command3` and `cohere_command4`. `nemotron_v3`,
`nemotron_3` and `granite_thinking_parser` also read `force_nonempty_content` there: reasoning
without any content after it is sent as content, too."""


_RESPONSE_TEMPLATES = """
## Response templates

A checkpoint may declare in its tokenizer_config.json how its model's output is read: transformers'
`response_template`, version 1. `--reasoning-parser hf` and `--tool-call-parser hf` go by it, or
`auto` does; the tool parser needs the reasoning parser, which finds the regions of both. On a
well-formed output the result is that of transformers' `parse_response`. What differs:

- Text of a field that occurs again follows the text before, after its `join`; transformers keeps
  the last, which a stream cannot.
- A region of calls that does not read as its field says, or that the output's end cuts off, is
  content as it stands; transformers raises an error.
- A value that is written as text (`xml-inline`, `kv-lines`) has the type that the tool's schema
  gives it; without one its `value_parser` decides.
- Before the first region, up to 256 characters of no field are dropped; more of them, or an output
  without regions, are content.
- `optional` has no effect.

A template is refused at the start, with the field's name, if it has

- fields besides `thinking` (also `reasoning_content` or `reasoning`), `content` and `tool_calls`,
  or `defaults` for others besides `role`;
- `thinking` or `content` that is not text, has a `transform`, or `repeats` without a `join`;
- a transform that gives calls no name, or has placeholders of which nothing is known;
- marks of more than 256 characters, or patterns with assertions, back references, flags,
  possessive forms, repetitions of what may be empty, or more than 512 nodes.

Patterns are searched by a simulated automaton, in linear time whatever the model writes; they never
run as Python's regular expressions do. A `response_schema`, the older form, is not read.
"""


def parsers() -> str:
    """Every parser of model output in the box."""
    plugins = load_plugins()
    parts = [
        "# Parsers of model output\n\n",
        "Which tool-call and reasoning parsers are in the box, and for which models. Where vLLM "
        "has the format too, the name is vLLM's; SGLang's names are known, too (\"also\"). "
        "`jackfield plugins` lists these and what plugins "
        "add; how to write one: [write a plugin](../how-to/write-a-plugin.md).\n\n",
        _CHOICE,
    ]
    for kind, flag, about in (
        ("tool_parser", "--tool-call-parser", _TOOL_PARSERS),
        ("reasoning_parser", "--reasoning-parser", _REASONING_PARSERS),
    ):
        rows = []
        for entry in sorted(plugins[kind].entries(), key=lambda entry: entry.name):
            if entry.provenance.distribution != hooks.PROJECT:
                continue
            summary = inspect.cleandoc(plugins[kind].load(entry.name).__doc__ or "").split("\n\n")[
                0
            ]
            known = " and ".join(f"`{mark}`" for mark in entry.parser_marks.marks) or "not chosen"
            if entry.parser_marks.declaration:
                known = (
                    f"a {entry.parser_marks.declaration.replace('_', ' ')}, if no marks are known"
                )
            only = (
                f" ({', '.join(entry.parser_marks.model_types)})"
                if entry.parser_marks.model_types
                else ""
            )
            if entry.parser_marks.other_marks:
                only += "; or " + " and ".join(
                    f"`{mark}`" for mark in entry.parser_marks.other_marks
                )
            others = ", ".join(f"`{name}`" for name in entry.aliases)
            name = f"`{entry.name}`" + (f" (also {others})" if others else "")
            rows.append([name, entry.help, " ".join(summary.split()), f"{known}{only}"])
        parts.append(f"\n## {flag}\n\n{about}\n\n")
        parts.append(table(["name", "models", "what it reads", "auto"], rows))
    parts.append(_RESPONSE_TEMPLATES)
    return "".join(parts)
