"""Errors of prompts and models."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from kvlane.app.operator_error import OperatorError

NAMED_PROBLEMS = 3
LONGEST_MESSAGE = 1000
LONGEST_NAME = 40
"""Characters of a name that a client made up, such as a key of `logit_bias`, in an error."""


class PreprocessError(OperatorError):
    """Root of everything that preprocessing raises on purpose."""


class InvalidPrompt(PreprocessError):
    """The prompt cannot become a request. `field` is its path in the body, "" for the body."""

    def __init__(self, field: str, message: str) -> None:
        message = _cut(message, LONGEST_MESSAGE)
        super().__init__(f"{field}: {message}" if field else message)
        self.field, self.message = field, message


class TooLarge(InvalidPrompt):
    """A prompt would become more tokens than are accepted at a time."""


class ContextExceeded(InvalidPrompt):
    """Prompt and answer are longer than the model's context."""


class UnknownModel(InvalidPrompt):
    """No model of the deployment has the name."""


def context_error(field: str, most: int, context: int | None) -> InvalidPrompt:
    """The error for a prompt of more than `most` tokens, which were not counted to their end."""
    if context is not None and most >= context:
        message = f"this model's maximum context length is {context} tokens; the prompt has more"
        return ContextExceeded(field, message)
    return TooLarge(field, f"has more than {most} tokens")


class PreprocessorOverloaded(PreprocessError):
    """Too many prompts are being prepared."""


class BadModel(PreprocessError):
    """The model's files cannot be used."""

    correction = "Correct the folder with which the worker was started (KVLANE_MODEL_PATH)."


class ArtifactUnavailable(BadModel):
    """A file of the model is not, or not whole, in the log."""

    correction = "Start a worker of the model: a worker writes the files when it starts."


def invalid_prompt(error: ValidationError) -> InvalidPrompt:
    """The wrong fields and their errors; never the values, which may be private."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    fields = [".".join(map(_name, p["loc"])) for p in problems[:NAMED_PROBLEMS]]
    others = [f"{f}: {p['msg']}" for f, p in zip(fields, problems, strict=False)][1:]
    left = len(problems) - NAMED_PROBLEMS
    more = [f"and {left} more"] if left > 0 else []
    return InvalidPrompt(fields[0], "; ".join([problems[0]["msg"], *others, *more]))


def renamed(error: InvalidPrompt, names: Mapping[str, str]) -> InvalidPrompt:
    """The error of a chat with the field of the body that the chat was made of. `names`: of fields
    in that body, by those of the chat, the longer ones first; an entry of a list that was made anew
    has the name of the list."""
    field = error.field.replace(".function.", ".")
    for name, own in names.items():
        if field == name or field.startswith(f"{name}."):
            rest = field.removeprefix(name)
            return type(error)(own if rest[1:2].isdigit() else own + rest, error.message)
    return type(error)(field, error.message)


def _name(part: int | str) -> str:
    """A part of a field's path; names that clients make up may be long, and any text."""
    return (
        _cut(ascii(part[: LONGEST_NAME + 1])[1:-1], LONGEST_NAME)
        if isinstance(part, str)
        else str(part)
    )


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"
