"""What bin/compare trains: every scheme with every codec, and the options that lead other ways through the code.

A case is the options of GradientSync, or those of OneBitAdamW with a key "optimizer". Schemes and codecs are those of this
tree, so that a new one is compared from its second commit on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpisparse.names import CODECS, SCHEMES

Case = dict[str, Any]

SELECTED = {"density": 0.05}
OF_SCHEME: dict[str, Case] = {
    "dense": {},
    "diloco": {"every": 3},
    "drift": {**SELECTED, "every": 2},
    "sparseloco": {**SELECTED, "every": 3, "chunk": 512},
    "predictive": {**SELECTED, "history": 3, "validate_every": 6, "publish_after": 2},
    "threshold": {"threshold": 0.01},
    "dgc": {**SELECTED, "warm_up": 5},
}
OWN_MASKS: Case = {"masks": "own"}
LATE: Case = {"staleness": 1}
OVERLAP: Case = {"overlap": True, "bucket_mb": 0.004}
BY_NODE: Case = {"hierarchy": "node"}
BACKWARD: Case = {"accumulate": "backward"}
WHOLE: Case = {"density": 1.0}
LOSSY = ("fp32", "int8")
VARIANTS: list[tuple[str, tuple[str, ...], Case]] = [  # scheme, codecs, options
    ("dense", LOSSY, OVERLAP),
    ("dense", LOSSY, BY_NODE),
    ("exdyna", LOSSY, OVERLAP),
    ("exdyna", LOSSY, BY_NODE),
    ("exdyna", LOSSY, LATE),
    ("exdyna", LOSSY, WHOLE),
    ("exdyna", (*LOSSY, "momentum-int8"), OWN_MASKS),
    ("exdyna", LOSSY, OWN_MASKS | LATE),
    ("exdyna", LOSSY, OWN_MASKS | LATE | {"compensate": False}),
    ("exdyna", ("fp32",), OWN_MASKS | OVERLAP),
    ("exdyna", ("fp32",), OWN_MASKS | BY_NODE),
    ("exdyna", ("fp32",), {"controller": "paper", "partitioner": "paper"}),
    ("exdyna", ("fp32",), {"controller": "fixed", "partitioner": "static"}),
    ("exdyna", ("fp32",), {"reduce": "allreduce"}),
    ("exdyna", ("fp32",), {"scorer": "average"}),
    ("exdyna", ("fp32",), {"compensate": False}),
    ("exdyna", ("fp32",), {"nonfinite": "skip"}),
    ("momentum", ("momentum-int8",), OWN_MASKS),
    ("momentum", ("momentum-int8",), BY_NODE),
    ("momentum", ("momentum-int8",), {"mask": "gradient"}),
    ("momentum", ("momentum-int8",), {"percentile": "exact"}),
    ("momentum", ("momentum-int8",), {"compensate": False}),
    ("predictive", ("int8",), OWN_MASKS),
    ("topk", ("fp32",), BY_NODE),
    ("dgc", ("fp32",), BY_NODE),
    ("speculative", LOSSY, {"staleness": 0}),
    ("speculative", ("fp32",), {"staleness": 2}),
    ("speculative", ("fp32",), {"granularity": "coarse"}),
    ("speculative", ("fp32",), {"server": "rank0", "influence": "update"}),
    ("speculative", ("fp32",), {"average": "received", "compensate": False}),
    ("drift", ("fp32", "int4"), {"by": "groups", "density": 0.4}),
    ("drift", ("fp32", "int4"), WHOLE),
    ("drift", ("fp32", "int4"), WHOLE | {"spread": False}),
    ("drift", ("fp32", "int4"), LATE),
    ("drift", ("int4",), LATE | WHOLE),
    ("drift", ("int4",), {"dense_steps": 6}),
    ("drift", ("int4",), {"dense_steps": 6, "dense_codec": "fp32"}),
    ("drift", ("int4",), {"every": "1, 10:4"}),
]
ONEBIT: list[Case] = [
    {"codec": "sign"},
    {"codec": "int8", "warmup_codec": "fp32"},
    {"codec": "int4", "warmup_codec": "bf16", "refresh": 0},
]


def cases() -> Iterator[Case]:
    """List all cases, those that a scheme refuses among them."""
    for scheme in SCHEMES:
        if scheme == "auto":  # it chooses by times: no two runs need be alike
            continue
        own = OF_SCHEME.get(scheme, SELECTED)
        for codec in CODECS:
            yield {"scheme": scheme, "codec": codec, **own}
        for codec in (*LOSSY, "momentum-int8"):
            yield {"scheme": scheme, "codec": codec, **own, **BACKWARD}
    for scheme, codecs, options in VARIANTS:
        for codec in codecs:
            yield {"scheme": scheme, "codec": codec, **OF_SCHEME.get(scheme, SELECTED), **options}
    for options in ONEBIT:
        yield {"optimizer": "onebit", "warmup": 6, **options}


def name_of(case: Case) -> str:
    """Return what a case is called: its scheme and codec, and the options that its scheme has not in all cases."""
    scheme = case.get("scheme", "onebit")
    usual = {"scheme": scheme, "optimizer": scheme, "codec": case["codec"], **OF_SCHEME.get(scheme, SELECTED)}
    others = [f"{key}={value}" for key, value in case.items() if key not in usual or usual[key] != value]
    return " ".join([scheme, case["codec"], *others])


GOLDEN: dict[str, Case] = {
    "auto": {"scheme": "auto", "codec": "int8"},
    "drift": {"scheme": "drift", "codec": "int4", **OF_SCHEME["drift"]},
    "drift-late": {"scheme": "drift", "codec": "int4", **OF_SCHEME["drift"], **LATE},
    "drift-start": {"scheme": "drift", "codec": "int4", **OF_SCHEME["drift"], "dense_steps": 25},
    "diloco": {"scheme": "diloco", "codec": "int8", **OF_SCHEME["diloco"]},
    "sparseloco": {"scheme": "sparseloco", "codec": "int2", **OF_SCHEME["sparseloco"]},
    "demo": {"scheme": "demo", "codec": "fp32", **SELECTED},
    "exdyna-late": {"scheme": "exdyna", "codec": "fp32", **SELECTED, **LATE},
    "exdyna-overlap": {"scheme": "exdyna", "codec": "fp32", **SELECTED, **OVERLAP},
    "onebit": {"optimizer": "onebit", "codec": "sign", "warmup": 6},
}  # besides those that an earlier version of steps.py wrote
