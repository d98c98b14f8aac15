"""The curriculum: what each stage trains on, for how many steps, at which learning rate."""

from dataclasses import dataclass

from examples.train_tiny.data import Mixture

SIZE_256, SIZE_512 = (256, 128, 6), (512, 96, 8)
SIZE_1024, SIZE_2048, SIZE_8192 = (1024, 48, 16), (2048, 32, 24), (8192, 8, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command's worth of training; `sizes` are used in turn, one a step."""

    index: int
    sizes: tuple[tuple[int, int, int], ...]  # (length, rows, noised blocks a row)
    steps: int
    mixture: Mixture
    peak: float = 1.0  # times the learning rates of `muon.py`
    warmup: int = 20
    decay: int = 0  # last steps, linear to 2 %

    def rate(self, step: int) -> float:
        """Learning-rate factor of a step."""
        rise = min(1.0, (step + 1) / self.warmup)
        fall = min(1.0, (self.steps - step) / self.decay) if self.decay else 1.0
        return self.peak * rise * max(0.02, fall)


STAGES = {
    "256": Stage(
        index=0,
        sizes=(SIZE_256,),
        steps=1800,
        warmup=100,
        mixture=Mixture(
            shares={"lm": 0.1, "kv": 0.35, "niah": 0.2, "list": 0.05, "vt": 0.15, "copy": 0.15},
            questions=0.5,
            plain=0.2,
            lone=0.0,
            prose_weight=0.3,
        ),
    ),
    "512": Stage(
        index=1,
        sizes=(SIZE_512,),
        steps=2600,
        mixture=Mixture(
            shares={
                "lm": 0.25,
                "write": 0.03,
                "kv": 0.2,
                "niah": 0.14,
                "list": 0.1,
                "vt": 0.14,
                "cwe": 0.04,
                "copy": 0.1,
            },
            questions=0.5,
        ),
    ),
    "2048": Stage(
        index=2,
        sizes=(SIZE_2048,),
        steps=2400,
        mixture=Mixture(
            shares={
                "lm": 0.28,
                "write": 0.04,
                "kv": 0.17,
                "niah": 0.14,
                "list": 0.11,
                "vt": 0.12,
                "cwe": 0.05,
                "copy": 0.09,
            },
            questions=0.3,
        ),
    ),
    "8192": Stage(
        index=3,
        sizes=(SIZE_8192,),
        steps=1250,
        decay=400,
        mixture=Mixture(
            shares={
                "lm": 0.22,
                "write": 0.04,
                "kv": 0.2,
                "niah": 0.15,
                "list": 0.12,
                "vt": 0.12,
                "cwe": 0.06,
                "copy": 0.09,
            },
            questions=0.12,
        ),
    ),
    "mixed": Stage(
        index=4,
        sizes=(SIZE_1024, SIZE_1024, SIZE_1024, SIZE_8192),
        steps=7600,
        peak=0.7,
        warmup=100,
        decay=5000,
        mixture=Mixture(
            shares={
                "lm": 0.22,
                "write": 0.05,
                "kv": 0.13,
                "niah": 0.11,
                "list": 0.12,
                "vt": 0.1,
                "cwe": 0.05,
                "copy": 0.08,
                "story": 0.14,
            },
            questions=0.25,
            prose_weight=1.0,
            given=0.6,
            novels_only=True,
        ),
    ),
    "polish": Stage(
        index=5,
        sizes=(SIZE_1024, SIZE_1024, SIZE_1024, SIZE_8192),
        steps=1600,
        peak=0.5,
        warmup=50,
        decay=1300,
        mixture=Mixture(
            shares={
                "lm": 0.14,
                "write": 0.03,
                "kv": 0.18,
                "niah": 0.14,
                "list": 0.15,
                "vt": 0.1,
                "cwe": 0.07,
                "copy": 0.08,
                "story": 0.11,
            },
            questions=0.25,
            plain=0.65,
            prose_weight=0.5,
            given=0.6,
            novels_only=True,
        ),
    ),
}
