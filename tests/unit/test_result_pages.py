"""Pages of docs/results say what their records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpisparse.bench.converge.stability import markdown

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def records(place: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / place).read_text().splitlines()]


def test_memory() -> None:
    """Every scheme is there, with every part and what the process needed."""
    page, found = (RESULTS / "memory.md").read_text(), records("memory/memory.jsonl")
    for r in found:
        vectors = " | ".join(f"{r[part]:.2f}" for part in ("residual", "published", "scorer", "owners", "more", "peak"))
        small = " | ".join(f"{r[f'{part}_kB']:,.0f}" for part in ("blocks", "ladder", "candidates", "messages"))
        assert f"| `{r['case']}` | {vectors} | {small} |" in page
    assert len(found) == 15
    assert {r["elements"] for r in found} == {2_000_000}


def test_balance() -> None:
    page, found = (RESULTS / "balance.md").read_text(), records("balance/scaling.jsonl")
    by_size = {(r["ranks"], r["scheme"]): r for r in found}
    for size in {r["ranks"] for r in found}:
        ours, paper = by_size[size, "exdyna"], by_size[size, "exdyna:partitioner=paper"]
        assert ours["imbalance"] < paper["imbalance"]
        held = f"{ours['build_up']:.2f} | {100 * ours['worst_density']:.1f} %"
        balance = f"{ours['imbalance']:.2f} | {paper['imbalance']:.2f}"
        received = f"{ours['received_MB']:.3f} | {paper['received_MB']:.3f}"
        assert f"| {size:,} | {held} | {balance} | {received} |" in page
    assert max(size for size, _ in by_size) == 4096


def test_stability() -> None:
    """Its tables are those that the bench writes."""
    page, found = (RESULTS / "stability.md").read_text(), records("stability/records.jsonl")
    for table in markdown(found).strip().split("\n\n"):
        assert table.replace("| --- | --- | --- | --- |", "|---|---|---|---|") in page
    assert {r["runs"] for r in found} == {10}
    assert {r["case"] for r in found} == {"alone", "dense", "exdyna-0.01", "drift-0.01"}
