"""Claims of README and docs: each figure has one source and equal quotes; modules and combinations are as documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import mpisparse
from mpisparse.errors import ConfigurationError
from mpisparse.names import CODECS, SCHEMES
from mpisparse.schemes import configure

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpisparse"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
SPEED = "docs/results/performance.md"  # the one source of figures of speed
QUOTES = ["README.md", SPEED, "docs/results/experiments.md"]
NUMBER = re.compile(r"\d+(?:\.\d+)?")
FASTER = re.compile(r"((?:\d+(?:\.\d+)?(?:,| and| to)? )+)times\s+faster than (?:MPI's )?Allreduce([^;|]*)")
STEPS = re.compile(r"((?:\d+(?:\.\d+)?(?: and| to)? )+)times\s+the\s+(?:training\s+)?steps\s+of\s+(?:torch\s+)?DDP")


def rows(page: str, first: str) -> dict[str, list[str]]:
    """Return the rows of the table with this head, by their first cell."""
    lines = iter(PAGES[page].splitlines())
    assert any(line.startswith(first) for line in lines), f"no table {first!r} in {page}"
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        if line.startswith("|---"):
            continue
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = cells
    return found


def numbers(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


# Speed


def ratios() -> list[float]:
    """Return the speed-ups of a step over Allreduce: on 2 and 4 ranks, then on 2 and 4 hosts."""
    table = rows(SPEED, "| | 2 ranks, shared memory | 4 ranks, shared memory |")
    return [numbers(cell)[0] for cell in table["exdyna faster than Allreduce, topk, cltk"][:4]]


def test_the_ratios_are_those_of_the_times_above_them() -> None:
    table = rows(SPEED, "| | 2 ranks, shared memory | 4 ranks, shared memory |")
    ours, dense = ([numbers(cell)[0] for cell in table[name][:4]] for name in ("exdyna", "MPI Allreduce (in place)"))
    of_medians = [theirs / mine for theirs, mine in zip(dense, ours, strict=True)]
    assert ratios() == pytest.approx(of_medians, rel=0.05), "a median of ratios is near the ratio of medians"


@pytest.mark.parametrize("page", QUOTES)
def test_speed_is_quoted_from_the_one_table(page: str) -> None:
    text = " ".join(PAGES[page].replace("**", "").split())
    claims = FASTER.findall(text)
    assert claims, f"{page} says nothing of speed"
    for shared, rest in claims:
        between = re.search(r"((?:\d+(?:\.\d+)? and )?\d+(?:\.\d+)?) times (?:between hosts )?on 1 Gbit/s", rest)
        assert between is not None, rest
        assert numbers(shared) + numbers(between[1]) == ratios()


def test_no_other_page_has_a_speed_of_its_own() -> None:
    for page, text in PAGES.items():
        if page not in QUOTES:
            assert not FASTER.search(" ".join(text.split())), page


@pytest.mark.parametrize("page", QUOTES)
def test_steps_beside_ddp_are_quoted_from_the_one_table(page: str) -> None:
    table = rows(SPEED, "| | ms per step | times DDP |")
    measured = [float(cells[1]) for name, cells in table.items() if name.startswith("exdyna")]
    claims = STEPS.findall(PAGES[page].replace("**", ""))
    assert claims, f"{page} says nothing of DDP"
    for claim in claims:
        assert numbers(claim) == [round(min(measured), 1), round(max(measured), 1)]


# Modules


def importers(package: str) -> set[str]:
    """Return the modules of mpisparse that import a package, as relative paths."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if package in [name.partition(".")[0] for name in names]:
                found.add(str(path.relative_to(PACKAGE)))
    return found


@pytest.mark.parametrize(
    ("page", "package", "claim"),
    [
        ("docs/explanation/design.md", "mpi4py", r"only (`[^\n]*?) imports mpi4py; ([^,]*), (`[^`]*`)"),
        ("docs/explanation/gpu.md", "cupy", r"(`backends/cuda/binding\.py`), (the only module) that\s+imports cupy"),
    ],
)
def test_a_package_is_imported_where_docs_say(page: str, package: str, claim: str) -> None:
    said = re.search(claim, PAGES[page])
    assert said is not None
    named = re.findall(r"`([^`]+\.py)`", said[0])
    paths = {path: pattern for pattern in reversed(named) for path in PACKAGE.glob(pattern)}  # a name before a pattern
    benches = {path for path in paths if "\ndef run(" in path.read_text()}
    files = {str(path.relative_to(PACKAGE)) for path, pattern in paths.items() if "*" not in pattern or path in benches}
    assert files
    assert importers(package) == files


# Schemes and codecs


def test_defaults_of_schemes_are_those_of_the_table() -> None:
    table = rows("docs/explanation/schemes.md", "| scheme | scorer |")
    assert [name.strip("`") for name in table] == list(SCHEMES)
    for name, cells in table.items():
        options = configure(name.strip("`"))
        assert (cells[2].split(",")[0], float(cells[3])) == (options.codec, options.density), name


def going_together() -> set[tuple[str, str]]:
    """Return the documented combinations of scheme and codec."""
    pairs = set()
    for names, (said,) in rows("docs/explanation/schemes.md", "| codec | goes with |").items():
        assert said.startswith("every scheme")
        without = re.findall(r"`([^`]+)`", said)
        assert set(without) <= set(SCHEMES)
        pairs |= {
            (scheme, codec) for codec in re.findall(r"`([^`]+)`", names) for scheme in SCHEMES if scheme not in without
        }
    return pairs


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.filterwarnings('ignore:scheme "predictive" without validation')
def test_codecs_go_with_schemes_as_docs_say(scheme: str) -> None:
    """Each combination runs two real steps."""
    torch.manual_seed(0)
    for codec in CODECS:
        model = torch.nn.Linear(40, 30)
        if (scheme, codec) not in going_together():
            with pytest.raises(ConfigurationError, match="codec"):
                mpisparse.GradientSync(model, scheme=scheme, codec=codec)
            continue
        options = {"density": None if SCHEMES[scheme].density == 1.0 else 0.1, "codec": codec}
        options |= {"every": 1} if SCHEMES[scheme].of_weights else {}
        sync = mpisparse.GradientSync(model, scheme=scheme, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpisparse.attach(optimizer, sync)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
        assert sync.stats.selected > 0, codec
        sync.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.filterwarnings('ignore:scheme "predictive" without validation')
def test_dropping_goes_with_schemes_as_docs_say(scheme: str) -> None:
    if scheme in ("dense", "demo", "auto") or SCHEMES[scheme].of_weights:
        with pytest.raises(ConfigurationError, match="unknown option 'compensate'"):
            configure(scheme, compensate=False)
        return
    assert configure(scheme, compensate=False).values()["compensate"] is False


def test_averages_and_allreduce_go_with_what_docs_say() -> None:
    assert configure("exdyna", scorer="average")
    assert configure("momentum", scorer="average")
    for codec in CODECS:
        if codec == "fp32":
            assert configure("exdyna", reduce="allreduce", codec=codec)
        else:
            with pytest.raises(ConfigurationError, match="sums float32"):
                configure("exdyna", reduce="allreduce", codec=codec)
