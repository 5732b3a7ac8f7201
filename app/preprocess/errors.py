"""What can be wrong with a prompt or with a model.

One tree:

    PreprocessError
    ├── InvalidPrompt         the client's doing: names the field
    │   └── TooLarge              … or would become more than is taken at a time
    ├── Overloaded            more work waits than this process takes on
    └── BadModel              the model's files cannot be used
        └── ArtifactUnavailable   … or are not, or not whole, in the log
"""

from __future__ import annotations

from pydantic import ValidationError

NAMED_PROBLEMS = 3
"""How many wrong fields an error names; the first ones tell enough."""


class PreprocessError(Exception):
    """Root of everything that preprocessing raises on purpose."""


class InvalidPrompt(PreprocessError):
    """The prompt cannot become a request. `field` is its path in the body, "" for the body."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field, self.message = field, message


class TooLarge(InvalidPrompt):
    """What a prompt would become is more than is taken at a time. Ask for less, or in parts."""


class Overloaded(PreprocessError):
    """Too many prompts are being prepared. Try again shortly, or add a process."""


class BadModel(PreprocessError):
    """The model's files cannot be used. Look at the model folder its worker was started with."""


class ArtifactUnavailable(BadModel):
    """A file of the model is not, or not whole, in the log. Its worker writes it when it starts."""


def invalid(error: ValidationError) -> InvalidPrompt:
    """The wrong fields and what is wrong with them; never what was given, it may be private."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    fields = [".".join(map(str, p["loc"])) for p in problems]
    others = [f"{f}: {p['msg']}" for f, p in zip(fields, problems, strict=True)][1:NAMED_PROBLEMS]
    left = len(problems) - NAMED_PROBLEMS
    more = [f"and {left} more"] if left > 0 else []
    return InvalidPrompt(fields[0], "; ".join([problems[0]["msg"], *others, *more]))
