"""Preprocessed requests in the JSON form of NVIDIA Dynamo: the body of a prompt of kind `tokens`.

`flatten` moves its groups of options (`stop_conditions`, `sampling_options`, `output_options`,
`routing`) to the fields of `TokensBody` and its `nvext`, so that bounds, names and types are
checked in one place. Null is absent. Options that no engine here honours are refused
(`unsupported_fields.py`). `mdc_sum`, of another deployment's model card, is ignored. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlane.app.preprocess.prompt_errors import InvalidPrompt

_GROUPS: Mapping[str, Mapping[str, str]] = {
    "": {name: f"nvext.{name}" for name in (
        "annotations", "router_config_override", "extra_args", "agent_context",
        "request_timestamp_ms", "router", "mm_routing_info",
    )},
    "stop_conditions": {
        "max_tokens": "max_tokens", "stop": "stop", "stop_token_ids": "stop_token_ids",
        "stop_token_ids_hidden": "stop_token_ids_hidden", "min_tokens": "min_tokens",
        "ignore_eos": "ignore_eos", "max_thinking_tokens": "nvext.max_thinking_tokens",
    },
    "sampling_options": {name: name for name in (
        "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output",
        "allowed_token_ids", "bad_words_token_ids", "logit_bias",
    )},
    "sampling_options.guided_decoding": {
        "json": "structured_outputs.json", "regex": "structured_outputs.regex",
        "choice": "structured_outputs.choice", "grammar": "structured_outputs.grammar",
        "structural_tag": "structured_outputs.structural_tag",
        "whitespace_pattern": "structured_outputs.whitespace_pattern",
        "backend": "guided_decoding_backend",
    },
    "output_options": {name: name for name in (
        "logprobs", "prompt_logprobs", "skip_special_tokens", "return_tokens_as_token_ids",
    )},
    "routing": {
        "expected_output_tokens": "nvext.agent_hints.osl",
        "priority_jump": "nvext.agent_hints.priority_jump",
        "priority": "nvext.agent_hints.priority",
        "strict_priority": "nvext.agent_hints.strict_priority",
    } | {name: f"nvext.{name}" for name in (
        "backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank",
        "prefill_dp_rank", "lora_name", "allowed_worker_ids", "routing_constraints",
        "session_control", "queue_class",
    )},
}  # fmt: skip
"""By group, the field of a body that each of its fields becomes."""


class Flattened(NamedTuple):
    """The fields of a `TokensBody`. `paths`: of a field that was moved, its path in the form."""

    fields: Mapping[str, Any]
    paths: Mapping[str, str]

    def path_of(self, field: str) -> str:
        for moved, path in self.paths.items():
            if field == moved or field.startswith(f"{moved}."):
                return path + field[len(moved) :]
        return field


def flatten(fields: Mapping[str, Any]) -> Flattened:
    """Move grouped options to the fields of a `TokensBody`. Raises InvalidPrompt for a group that
    is no object, and an option that is given in both forms."""
    flat = {name: value for name, value in fields.items() if value is not None}
    paths: dict[str, str] = {}
    for group, options in _GROUPS.items():
        for name, target in options.items():
            path = f"{group}.{name}" if group else name
            if (value := _value(fields, path)) is None:
                continue
            _put(flat, target, path, value)
            if target != path:
                paths[target] = path
    return Flattened(flat, paths)


def _value(fields: Mapping[str, Any], path: str) -> Any:
    """The value at a path, or None. Raises InvalidPrompt for a group that is no object."""
    *groups, name = path.split(".")
    at: Any = fields
    for depth, group in enumerate(groups, 1):
        at = at.get(group)
        if at is None:
            return None
        if not isinstance(at, dict):
            raise InvalidPrompt(".".join(groups[:depth]), "must be an object")
    return at.get(name)


def _put(fields: dict[str, Any], target: str, path: str, value: Any) -> None:
    """Set a field by its path. The objects on the way are copied: they are the client's."""
    *groups, name = target.split(".")
    at = fields
    for group in groups:
        inner = at.get(group)
        if inner is not None and not isinstance(inner, dict):
            raise InvalidPrompt(group, "must be an object")
        at[group] = at = dict(inner or {})
    if at.get(name) is not None and target != path:
        raise InvalidPrompt(path, f"is given twice, as {target} too")
    at[name] = value
