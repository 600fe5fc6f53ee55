"""What stays in high precision: the Policy that dispatch obeys, its rules for layers and heads, and their JSON file.

    {"format": "flash_attn_mx.policy", "version": 1,
     "min_seqlen_k": 0, "max_outlier": null,
     "layers": [{"layer": 3, "heads": [0, 5], "reason": "error of O 31 %"}, {"layer": "encoder.*.attn"}]}

Only "format" and "version" are required. A layer is an index or a pattern over its name (* is any text);
without "heads" the whole layer stays in high precision; heads are query heads.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Optional, Union

from ._errors import fail

FORMAT, VERSION = "flash_attn_mx.policy", 1
Layer = Union[int, str]  # how a call says which layer it is: index or dotted name


def _is_like(name: str, pattern: str) -> bool:
    """Whether name is the pattern, * standing for any text. Dynamo cannot trace fnmatch."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == first
    if not name.startswith(first):
        return False
    position = len(first)
    for part in rest[:-1]:
        found = name.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return len(name) >= position + len(rest[-1]) and name.endswith(rest[-1])


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """One layer, or one pattern of layers, that stays in high precision.

    layer: index, or pattern over names, in which * is any text. An index also fits a name in which it is the only number
      ("model.layers.3.self_attn" is layer 3).
    heads: query heads; None = all.   reason: for people.
    """

    layer: Layer
    heads: Optional[tuple[int, ...]] = None
    reason: str = ""

    def fits(self, layer: Layer) -> bool:
        """Whether the rule is about the layer that a call names."""
        if isinstance(self.layer, int):
            if isinstance(layer, int):
                return self.layer == layer
            numbers = [part for part in layer.split(".") if part.isdigit()]
            return len(numbers) == 1 and int(numbers[0]) == self.layer
        return _is_like(str(layer), self.layer)


@dataclasses.dataclass(frozen=True)
class Policy:
    """When `auto` leaves MXFP8 for high precision; operands that are quantised already stay MXFP8.

    min_seqlen_k: keys below which quantising does not pay; 0 = never.
    max_outlier: bound on amax(|x|) / rms(x) of q, k and v; None = not looked at (the statistic reads the data).
    layers: rules for calls that say which layer they are (argument `layer` of the attention functions).
    """

    min_seqlen_k: int = 0
    max_outlier: Optional[float] = None
    layers: tuple[LayerRule, ...] = ()

    def __post_init__(self):
        n = self.min_seqlen_k
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            fail(ValueError, "min_seqlen_k", "an int >= 0", repr(n))
        number = isinstance(self.max_outlier, (int, float)) and not isinstance(
            self.max_outlier, bool
        )
        if not (self.max_outlier is None or (number and self.max_outlier > 1)):
            fail(ValueError, "max_outlier", "None or a ratio > 1", repr(self.max_outlier))
        if not (
            isinstance(self.layers, tuple) and all(isinstance(r, LayerRule) for r in self.layers)
        ):
            fail(TypeError, "layers", "a tuple of LayerRule", repr(self.layers))

    def rules_for(self, layer: Optional[Layer]) -> tuple[LayerRule, ...]:
        """The rules about that layer; none for a call that does not say its layer."""
        return () if layer is None else tuple(r for r in self.layers if r.fits(layer))


def check_layer(layer: object) -> None:
    """Raises TypeError for what is no index or name."""
    if not (layer is None or (isinstance(layer, (int, str)) and not isinstance(layer, bool))):
        fail(TypeError, "layer", "an index, a name or None", type(layer).__name__)


# --- the file -------------------------------------------------------------------------------------------------


def as_dict(policy: Policy) -> dict:
    """What the JSON file holds."""
    layers = []
    for rule in policy.layers:
        entry: dict = {"layer": rule.layer}
        if rule.heads is not None:
            entry["heads"] = list(rule.heads)
        if rule.reason:
            entry["reason"] = rule.reason
        layers.append(entry)
    return {
        "format": FORMAT,
        "version": VERSION,
        "min_seqlen_k": policy.min_seqlen_k,
        "max_outlier": policy.max_outlier,
        "layers": layers,
    }


def write(policy: Policy, path: Union[str, os.PathLike]) -> None:
    """Writes the policy as a JSON file that `read` and famx.load_policy accept."""
    Path(path).write_text(json.dumps(as_dict(policy), indent=1) + "\n", encoding="utf-8")


def read(path: Union[str, os.PathLike]) -> Policy:
    """The policy of a JSON file.

    Raises: OSError (file), ValueError or TypeError that names the file, the entry, what was expected and what came.
    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # JSON or UTF-8
        fail(ValueError, f"policy file {path}", "JSON", str(error))
    return from_dict(body, f"policy file {path}")


def from_dict(body: object, where: str = "policy") -> Policy:
    """The policy that as_dict(policy) describes; every entry is checked."""
    if not isinstance(body, dict):
        fail(ValueError, where, "a JSON object", type(body).__name__)
    if body.get("format") != FORMAT:
        fail(ValueError, f'{where}: "format"', repr(FORMAT), repr(body.get("format")))
    if body.get("version") != VERSION:
        fail(ValueError, f'{where}: "version"', VERSION, repr(body.get("version")))
    known = ("format", "version", "min_seqlen_k", "max_outlier", "layers")
    _check_keys(body, known, where)
    layers = body.get("layers", [])
    if not isinstance(layers, list):
        fail(ValueError, f'{where}: "layers"', "a list", type(layers).__name__)
    rules = tuple(_rule(entry, f"{where}: layers[{i}]") for i, entry in enumerate(layers))
    try:
        return Policy(body.get("min_seqlen_k", 0), body.get("max_outlier"), rules)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_keys(entry: dict, known: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(entry) - set(known))
    if unknown:
        fail(ValueError, where, f"keys out of {known}", unknown)


def _rule(entry: object, where: str) -> LayerRule:
    if not isinstance(entry, dict):
        fail(ValueError, where, "an object", type(entry).__name__)
    _check_keys(entry, ("layer", "heads", "reason"), where)
    layer, heads, reason = entry.get("layer"), entry.get("heads"), entry.get("reason", "")
    index = isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
    if not (index or (isinstance(layer, str) and layer)):
        fail(ValueError, f'{where}: "layer"', "an index >= 0 or a pattern of names", repr(layer))
    if heads is not None:
        good = isinstance(heads, list) and heads
        if not (good and all(type(h) is int and h >= 0 for h in heads)):
            fail(ValueError, f'{where}: "heads"', "a list of head indices >= 0", repr(heads))
        heads = tuple(sorted(set(heads)))
    if not isinstance(reason, str):
        fail(ValueError, f'{where}: "reason"', "a string", repr(reason))
    return LayerRule(layer, heads, reason)
