"""Typed reads from a published `config.json`; each misfit is noted and the reading goes on."""

from __future__ import annotations

from typing import Any

from convert.report import Findings


class FieldReader:
    """Reads fields of one config.

    A read returns `None` after it has noted a fault. Nothing is filled in: the defaults of a
    published config class are often not those of the published models.
    """

    def __init__(self, config: dict[str, Any], findings: Findings, prefix: str = "") -> None:
        """Reads `config`, whose fields are called `prefix` and their name in faults."""
        self.config = config
        self._findings = findings
        self._prefix = prefix

    def section(self, name: str) -> FieldReader:
        """A reader of a required table inside the config; of an empty one after a fault."""
        table = self.config.get(name)
        if not isinstance(table, dict):
            self._misfit(name, table, "a table")
            table = {}
        return FieldReader(table, self._findings, f"{self._prefix}{name}.")

    def integer(self, name: str, minimum: int = 1) -> int | None:
        """A required integer of at least `minimum`."""
        value = self.config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        return self._misfit(name, value, f"an integer >= {minimum}")

    def number(self, name: str) -> float | None:
        """A required positive number."""
        return self._positive(name, self.config.get(name))

    def flag(self, name: str, *, default: bool | None = None) -> bool | None:
        """A boolean; `default` stands for an absent one if the tensors will prove it."""
        value = self.config.get(name)
        if isinstance(value, bool):
            return value
        if value is None and default is not None:
            return default
        return self._misfit(name, value, "true or false")

    def allow(self, name: str, *values: object) -> None:
        """Notes a fault unless the field has one of these values; `None` also means absent."""
        value = self.config.get(name)
        if value not in values:
            wanted = " or ".join("absent" if v is None else _spelled(v) for v in values)
            self._misfit(name, value, wanted, "This is not supported.")

    def rope_theta(self, *, is_partial: bool = False) -> float | None:
        """The rotary base, at the top level or in `rope_parameters`, without any scaling.

        Args:
            is_partial: True if `rotary_fraction` reads `partial_rotary_factor` there.
        """
        found: dict[str, Any] = {}
        if self.config.get("rope_theta") is not None:
            found["rope_theta"] = self.config["rope_theta"]
        for name in ("rope_parameters", "rope_scaling"):
            table = self.config.get(name)
            if table is None:
                continue
            if not isinstance(table, dict):
                self._misfit(name, table, "a table or null")
                continue
            kind = table.get("rope_type", table.get("type", "default"))
            known = {"rope_type", "type", "rope_theta"}
            known |= {"partial_rotary_factor"} if is_partial else set()
            unknown = sorted(set(table) - known)
            unknown = [key for key in unknown if table[key] not in (None, 1, 1.0)]
            if kind != "default" or unknown:
                self._misfit(name, table, "no scaling of positions", "This is not supported.")
            if table.get("rope_theta") is not None:
                found[f"{name}.rope_theta"] = table["rope_theta"]
        if len(set(map(repr, map(_as_float, found.values())))) > 1:
            return self._misfit("rope_theta", found, "the same number everywhere")
        return self._positive("rope_theta", next(iter(found.values()), None))

    def rotary_fraction(self) -> float | None:
        """The share of each head that is rotated, at the top level or in `rope_parameters`."""
        found: dict[str, Any] = {}
        tables = {"": self.config, "rope_parameters.": self.config.get("rope_parameters")}
        for prefix, table in tables.items():
            if isinstance(table, dict) and table.get("partial_rotary_factor") is not None:
                found[f"{prefix}partial_rotary_factor"] = table["partial_rotary_factor"]
        if len(set(map(repr, map(_as_float, found.values())))) > 1:
            return self._misfit("partial_rotary_factor", found, "the same number everywhere")
        return self._positive("partial_rotary_factor", next(iter(found.values()), None))

    def refuse_sliding_window(self) -> None:
        """Notes a fault if any layer attends to a window only."""
        window = self.config.get("sliding_window")
        if window is not None and self.config.get("use_sliding_window") is not False:
            self._misfit(
                "sliding_window",
                window,
                "null, or use_sliding_window false",
                "Attention to a window is not supported.",
            )
        kinds = self.config.get("layer_types") or []
        others = sorted({str(kind) for kind in kinds} - {"full_attention"})
        if others:
            self._misfit("layer_types", others, "full_attention only", "This is not supported.")

    def misfit(self, name: str, value: object, expected: str) -> None:
        """Notes a fault of a field that the caller has read itself."""
        self._misfit(name, value, expected)

    def _positive(self, name: str, value: Any) -> float | None:
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        return self._misfit(name, value, "a positive number")

    def _misfit(self, name: str, value: object, expected: str, fix: str = "") -> None:
        absent = name not in self.config and value is None
        self._findings.fault(
            "config",
            f"config.json: {self._prefix}{name}",
            expected=expected,
            found="no such field" if absent else _spelled(value),
            fix=fix or "Set it in config.json to what the checkpoint was trained with.",
        )


def _as_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) else value


def _spelled(value: object) -> str:
    """The value as JSON would spell it."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
