"""Jobs on a real Slurm, submitted as a user would: a copied template, the account filled in, settings after its name.

Open MPI is that of the running environment; MPICH that of MPISPARSE_MPICH_PYTHON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mpisparse.checkpoint import h5file, store
from mpisparse.checkpoint.model_files import read_model

pytestmark = pytest.mark.usefixtures("lab")

TEMPLATES = Path(__file__).parents[2] / "slurm"
TIMEOUT = 1200.0  # seconds for a job; with a restart one takes about twenty, on a machine with nothing else to do
WATCHDOG = 600.0  # seconds after which a waiting rank ends its job by itself
STEPS = 40
SETTINGS = [
    *("--model", "tiny:model", "--data", "tiny:data", "--steps", str(STEPS), "--batch-size", "4"),
    *("--density", "0.05", "--eval-every", "40", "--checkpoint-every", "5"),
]
TRAINED = "train --model resnet18 --density 0.001 --epochs 10 --checkpoint-every 500"  # in the templates
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

TINY = """
import os, sys, time
import torch
from torch import nn

# A job that is to be disturbed takes its time before its first restart.
WAIT = 0.0 if "SLURM_RESTART_COUNT" in os.environ else float(os.environ.get("TINY_SLOW", "0"))

class Noisy(torch.utils.data.Dataset):
    def __init__(self, count):
        self.inputs = torch.randn(count, 12, generator=torch.Generator().manual_seed(count))
        self.targets = self.inputs[:, :4].argmax(1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        time.sleep(WAIT)
        return self.inputs[index] + 0.1 * torch.randn(12), self.targets[index]

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

def data():
    return Noisy(400), Noisy(50)

def exits():
    print("leaving", flush=True)
    sys.exit(7)
"""


# Means


def slurm(*words: object) -> str:
    """Return the output of a Slurm command; retries if a busy controller closed its socket."""
    for _ in range(3):
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != -signal.SIGPIPE:
            break
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(condition: Callable[[], object], told: Callable[[], str], seconds: float = TIMEOUT) -> None:
    """Poll until a condition holds; fails after a time-out."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited for {seconds:g} s\n{told()}"
        time.sleep(0.1)


@dataclass
class Site:
    """A user's home: an environment with one MPI, the module tiny, copies of templates."""

    home: Path
    mpi: str
    programs: Path
    submitted: list[int] = field(default_factory=list)
    references: dict[tuple[int, int], Path] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("PRTE_")}  # let Slurm place ranks
        return {
            **own,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.home),
            "MPISPARSE_PROGRESS": "plain",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "PMIX_MCA_psec": "native",
        }

    def fill_in(self, template: str) -> Path:
        """Copy a template and fill in the user's part: the account, the environment, what to train."""
        text = (TEMPLATES / f"{template}.sbatch").read_text().replace("ACCOUNT", "physics", 1)
        text, count = re.subn(r"^\. ~/mpisparse.*$", f'export PATH="{self.programs}:$PATH"', text, flags=re.MULTILINE)
        assert count == 1
        assert TRAINED in text
        text = text.replace(TRAINED, " ".join(["train", *SETTINGS]))
        script = self.home / f"{template}.sbatch"
        script.write_text(text)
        return script

    def sbatch(self, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **variables}
        command = ["sbatch", *map(str, words)]
        return subprocess.run(command, cwd=self.home, env=environment, capture_output=True, text=True, timeout=TIMEOUT)

    def submit(self, script: Path, *settings: str, nodes: int, ranks: int, out: str, options: tuple[str, ...] = (), **variables: str) -> Job:  # fmt: skip  # noqa: E501
        """Submit a script with a number of nodes and of ranks per node; its run's directory is `out`."""
        shape = (f"--nodes={nodes}", f"--ntasks-per-node={ranks}", "--cpus-per-task=1", f"--job-name={out}", *options)
        words = ("--parsable", *shape, script, "--out", self.home / out, *settings)
        done = self.sbatch(*words, **variables)
        assert done.returncode == 0, done.stderr
        number = int(done.stdout)
        self.submitted.append(number)
        return Job(number, self.home / out, self.home / f"{out}-{number}.log")

    def reference(self, nodes: int = 2, ranks: int = 2) -> Path:
        """Return an undisturbed run of the MPI's own template."""
        if (nodes, ranks) not in self.references:
            script = self.fill_in("cpu-openmpi" if self.mpi == "openmpi" else "cpu-mpich")
            job = self.submit(script, nodes=nodes, ranks=ranks, out=f"reference-{nodes}-{ranks}")
            assert job.wait() == ("COMPLETED", 0), job.told()
            assert f"start: {nodes * ranks} ranks" in job.told()
            assert "training is done, after 0 restarts" in job.told()
            self.references[nodes, ranks] = job.out
        return self.references[nodes, ranks]


@dataclass
class Job:
    """A job: its number, the directory of its run, its log."""

    number: int
    out: Path
    log: Path

    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else "(no log)"

    def fields(self) -> dict[str, str]:
        """Return what Slurm knows about the job."""
        return dict(re.findall(r"(\w+)=(\S*)", slurm("scontrol", "show", "job", "-o", self.number)))

    @property
    def restarts(self) -> int:
        return int(self.fields()["Restarts"])

    def step(self) -> int:
        """Return the last step in its metrics."""
        with contextlib.suppress(OSError):
            steps = re.findall(r'"kind": "step".*?"step": (\d+)', (self.out / "metrics.jsonl").read_text())
            return int(steps[-1]) if steps else 0
        return 0

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step or self.fields()["JobState"] in ENDED, self.told)
        assert step <= self.step() < STEPS, self.told()

    def wait(self, seconds: float = TIMEOUT) -> tuple[str, int]:
        """Wait for its end; its state and exit code."""
        wait_until(lambda: self.fields()["JobState"] in ENDED, lambda: f"{self.fields()}\n{self.told()}", seconds)
        known = self.fields()
        return known["JobState"], int(known["ExitCode"].partition(":")[0])

    def ranks(self) -> list[int]:
        """Return the process ids of its live ranks."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                python = (process / "exe").resolve().name.startswith("python")
                if python and str(self.out).encode() in words and b"train" in words:
                    found.append(int(process.name))
        return found


def make_site(home: Path, mpi: str) -> Site:
    python = Path(sys.executable) if mpi == "openmpi" else Path(os.environ.get("MPISPARSE_MPICH_PYTHON", "/nowhere"))
    if not python.with_name("mpirun").exists():
        pytest.skip(f"no {mpi}: there is no mpirun beside {python}")
    programs = home / "bin"
    programs.mkdir()
    (programs / "mpisparse").write_text(f'#!/bin/sh\nexec "{python}" -m mpisparse.runtime.cli "$@"\n')
    (programs / "mpirun").write_text(f'#!/bin/sh\nexec "{python.with_name("mpirun")}" "$@"\n')
    (programs / "apptainer").write_text('#!/bin/sh\n[ "$1 $2" = "exec --bind" ] && shift 4 && exec "$@"\n')  # a stand-in
    for program in programs.iterdir():
        program.chmod(0o755)
    (home / "tiny.py").write_text(TINY)
    return Site(home, mpi, programs)


@pytest.fixture(scope="module")
def openmpi(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("openmpi"), "openmpi")


@pytest.fixture(scope="module")
def mpich(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("mpich"), "mpich")


@pytest.fixture(params=["openmpi", "mpich"])
def site(request: pytest.FixtureRequest) -> Site:
    found: Site = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def no_jobs_left() -> Any:
    """Cancel the jobs that a failed test left."""
    yield
    slurm("scancel", "--user=root")
    wait_until(lambda: not slurm("squeue", "--noheader"), lambda: slurm("squeue"))


def arrays(out: Path) -> dict[str, bytes]:
    """Return all arrays of a run's newest checkpoint: parameters, buffers, residuals, optimizer and generator states."""
    newest = store.found(out / "checkpoints")[0]
    manifest = store.read_manifest(newest)
    assert manifest.step == STEPS
    parts = {}
    for record in manifest.files:
        own, _ = h5file.read_file(newest / record.name, record)
        parts.update({f"{record.name}/{name}": array.tobytes() for name, array in own.items()})
    return parts


def assert_same_end(out: Path, reference: Path) -> None:
    ended, expected = arrays(out), arrays(reference)
    assert ended.keys() == expected.keys()
    assert [name for name in expected if ended[name] != expected[name]] == []


# A script of the user's own

MINE = """
import os, sys, time
import torch
import mpisparse

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
sync = mpisparse.GradientSync(model, density=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
mpisparse.attach(optimizer, sync)
torch.manual_seed(sync.rank)
saves = mpisparse.checkpoint.every(sys.argv[1], steps=5, model=model, optimizer=optimizer, sync=sync)
for step in range(saves.step, 30):
    optimizer.zero_grad()
    model(torch.randn(6, 12)).square().mean().backward()
    optimizer.step()
    time.sleep(0.0 if "SLURM_RESTART_COUNT" in os.environ else float(os.environ.get("SLOW", "0")))
    saves.step_done()
saves.finish()
print("reached", saves.step, "of", sync.size, "ranks")
"""


def test_a_script_of_ones_own_is_stopped_and_requeued(openmpi: Site) -> None:
    """As `mpisparse slurm -- python mine.py` prints it; the end has the bits of a run that nobody disturbed."""
    home = openmpi.home
    (home / "mine.py").write_text(MINE)
    words = [
        "slurm",
        "--mpi",
        "openmpi",
        "--launcher",
        "srun",
        "--ranks-per-node",
        "2",
        "--",
        "python",
        "mine.py",
        "disturbed",
    ]
    text = subprocess.run([sys.executable, "-m", "mpisparse", *words], capture_output=True, text=True, check=True).stdout
    (home / "mine.sbatch").write_text(text)
    done = openmpi.sbatch("--parsable", "--job-name=mine", home / "mine.sbatch", SLOW="1")
    assert done.returncode == 0, done.stderr
    openmpi.submitted.append(int(done.stdout))
    job = Job(int(done.stdout), home / "disturbed", home / f"mine-{int(done.stdout)}.log")
    wait_until(lambda: store.found(job.out) or job.fields()["JobState"] in ENDED, job.told)
    slurm("scancel", "--signal=USR1", job.number)
    assert job.wait() == ("COMPLETED", 0), job.told()
    told = job.told()
    for words_told in ("asked to stop; start the same command again", "requeued, restart 1", "continues from step"):
        assert words_told in told, told
    assert "reached 30 of 2 ranks" in told
    assert "training is done, after 1 restarts" in told
    whole = subprocess.run(
        [openmpi.programs / "mpirun", "-n", "2", "--oversubscribe", sys.executable, "mine.py", "whole"], cwd=home,
        env={**openmpi.environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    models = [read_model(home / name / store.name_of(30)).tensors for name in ("disturbed", "whole")]
    assert [name for name in models[0] if not torch.equal(models[0][name], models[1][name])] == []


# Templates


@pytest.mark.parametrize("template", sorted(path.stem for path in TEMPLATES.glob("*.sbatch")))
def test_slurm_takes_the_template(openmpi: Site, template: str) -> None:
    done = openmpi.sbatch("--test-only", openmpi.fill_in(template))
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


@pytest.mark.parametrize(
    "words",
    ["--nodes 4 --ranks-per-node 8 --time 30 --account abc", "--nodes 2 --gpus-per-node 4 --time 1-0", "--launcher mpirun"],
)
def test_slurm_takes_what_the_command_prints(site: Site, words: str) -> None:
    command = [site.programs / "mpisparse", "slurm", *words.split(), "--", "train", "--steps", "5"]
    script = subprocess.run(command, env=site.environment, capture_output=True, text=True, timeout=600, check=True).stdout
    kind = "pmix" if site.mpi == "openmpi" else "pmi2"
    assert (f"srun --mpi={kind}" in script) != ("--launcher" in words)
    file = site.home / "printed.sbatch"
    file.write_text(script)
    done = site.sbatch("--test-only", file)
    assert done.returncode == 0, done.stderr


NODES = [2, pytest.param(4, marks=pytest.mark.slow)]  # of two ranks; test_doctor_under_srun has four nodes


@pytest.mark.parametrize("nodes", NODES)
def test_the_template_of_each_mpi(site: Site, nodes: int) -> None:
    out = site.reference(nodes)
    told = next(site.home.glob(f"{out.name}-*.log")).read_text()
    assert set(re.findall(r"^r(\d+) \|", told, re.MULTILINE)) == {"0"}, "output of one rank only"


@pytest.mark.parametrize("nodes", NODES)
def test_mpirun_inside_sbatch(site: Site, nodes: int) -> None:
    job = site.submit(site.fill_in("mpirun"), "--log-ranks", nodes=nodes, ranks=2, out=f"mpirun-{nodes}")
    assert job.wait() == ("COMPLETED", 0), job.told()
    assert "training is done, after 0 restarts" in job.told()
    logs = sorted((job.out / "logs").iterdir())
    assert [log.name for log in logs] == [f"rank-{rank:04}.log" for rank in range(2 * nodes)]
    places = [re.findall(r" on (n\d),", log.read_text())[0] for log in logs]
    assert [places.count(place) for place in sorted(set(places))] == [2] * nodes
    assert_same_end(job.out, site.reference(nodes))


def test_an_array_trains_each_line_and_comes_back_one_by_one(openmpi: Site) -> None:
    (openmpi.home / "slurm").mkdir(exist_ok=True)
    (openmpi.home / "slurm" / "sweep.txt").write_text("--seed 1\n--seed 2\n")
    script = openmpi.fill_in("array")
    shape = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--array=1-2", "--job-name=sweep")
    done = openmpi.sbatch("--parsable", *shape, script, TINY_SLOW="0.08")
    assert done.returncode == 0, done.stderr
    number = int(done.stdout)
    runs = [openmpi.home / "runs" / f"sweep-{number}" / str(task) for task in (1, 2)]
    first, second = (Job(number, run, openmpi.home / f"none-{run.name}.log") for run in runs)
    wait_until(lambda: min(first.step(), second.step()) >= 4, lambda: slurm("squeue"))
    slurm("scancel", "--signal=USR1", f"{number}_2")
    wait_until(lambda: not slurm("squeue", "--noheader"), lambda: slurm("squeue"))
    logs = {path.name.rpartition("-")[2]: path.read_text() for path in openmpi.home.glob("sweep-*.log")}
    assert "training is done, after 0 restarts" in logs["1.log"]
    assert "training is done, after 1 restarts" in logs["2.log"]
    assert arrays(runs[0]) != arrays(runs[1])


@pytest.mark.slow
def test_a_container_by_a_stand_in(openmpi: Site) -> None:
    job = openmpi.submit(openmpi.fill_in("apptainer"), nodes=2, ranks=2, out="container")
    assert job.wait() == ("COMPLETED", 0), job.told()
    assert_same_end(job.out, openmpi.reference())


# Disturbed, and back with the same bits


def usr1(job: Job) -> None:
    slurm("scancel", "--signal=USR1", job.number)


def term_to_the_batch_script(job: Job) -> None:
    slurm("scancel", "--batch", "--signal=TERM", job.number)


def requeue(job: Job) -> None:
    slurm("scontrol", "requeue", job.number)


def node_down(job: Job) -> None:
    node = slurm("scontrol", "show", "hostnames", job.fields()["NodeList"]).split()[-1]
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    wait_until(lambda: job.restarts == 1, job.told)
    with contextlib.suppress(AssertionError):  # on a busy machine it has come back by itself, and there is nothing to resume
        slurm("scontrol", "update", f"nodename={node}", "state=resume")


def preempt(job: Job) -> None:
    script = job.out.parent / "urgent.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=4 --exclusive --partition=high --output=/dev/null --time=1\nsleep 1\n")
    slurm("sbatch", script)


def only_with_all(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mpi", "template", "disturb"),
    [
        ("openmpi", "cpu-openmpi", usr1),
        ("openmpi", "cpu-openmpi", requeue),
        only_with_all("openmpi", "cpu-openmpi", node_down),
        only_with_all("openmpi", "cpu-openmpi", preempt),
        only_with_all("openmpi", "mpirun", term_to_the_batch_script),
        only_with_all("mpich", "cpu-mpich", usr1),
        only_with_all("mpich", "cpu-mpich", preempt),
        only_with_all("openmpi", "mpirun", preempt),
        only_with_all("openmpi", "mpirun", node_down),
        only_with_all("mpich", "mpirun", term_to_the_batch_script),
        only_with_all("mpich", "mpirun", preempt),
        only_with_all("mpich", "cpu-mpich", requeue),
        only_with_all("mpich", "cpu-mpich", node_down),
    ],
)
def test_a_disturbed_job_comes_back_and_ends_with_the_same_bits(
    request: pytest.FixtureRequest, mpi: str, template: str, disturb: Callable[[Job], None]
) -> None:
    site: Site = request.getfixturevalue(mpi)
    reference = site.reference()
    name = f"{template}-{disturb.__name__}"
    job = site.submit(site.fill_in(template), nodes=2, ranks=2, out=name, TINY_SLOW="0.08")
    job.wait_for_step(6)
    disturb(job)
    assert job.wait() == ("COMPLETED", 0), job.told()
    assert job.restarts == 1, job.told()
    assert "training is done, after 1 restarts" in job.told()
    assert "resume: 4 ranks" in job.told()
    assert_same_end(job.out, reference)
    checkpointed = "start the same command again to continue" in job.told()
    assert checkpointed or disturb is node_down or template == "mpirun", job.told()


@pytest.mark.slow
def test_a_job_stopped_by_its_own_signal_before_the_limit(openmpi: Site) -> None:
    limit = ("--time=2", "--signal=USR1@60")  # at least a minute to start in and a minute to stop in
    job = openmpi.submit(openmpi.fill_in("cpu-openmpi"), nodes=2, ranks=2, out="limit", options=limit, TINY_SLOW="2")
    assert job.wait() == ("COMPLETED", 0), job.told()
    assert "asked to stop" in job.told()
    assert re.search("training is done, after [1-9] restarts", job.told()), "Slurm may signal the next start early, too"
    assert_same_end(job.out, openmpi.reference())


@pytest.mark.slow
def test_a_job_stops_before_the_limit_without_a_signal(openmpi: Site) -> None:
    script = openmpi.fill_in("cpu-openmpi")
    script.write_text(re.sub(r"(?m)^#SBATCH --signal.*\n", "", script.read_text()))
    job = openmpi.submit(script, nodes=2, ranks=2, out="clock", options=("--time=1",), TINY_SLOW="0.5")
    assert job.wait() == ("COMPLETED", 0), job.told()
    assert "the job's time limit is near" in job.told()
    assert "training is done, after 1 restarts" in job.told()
    assert_same_end(job.out, openmpi.reference())


def test_restarts_are_limited_and_a_cancelled_job_stays_away(openmpi: Site) -> None:
    script = openmpi.fill_in("cpu-openmpi")
    script.write_text(script.read_text().replace("-ge 20", "-ge 0"))
    job = openmpi.submit(script, nodes=1, ranks=2, out="limited", TINY_SLOW="0.08")
    job.wait_for_step(3)
    usr1(job)
    assert job.wait() == ("FAILED", 85), job.told()
    assert "to continue, submit it again with the same --out" in job.told()
    job = openmpi.submit(openmpi.fill_in("cpu-openmpi"), nodes=1, ranks=2, out="limited", TINY_SLOW="0.08")
    wait_until(lambda: "resume: 2 ranks" in job.told(), job.told)
    slurm("scancel", job.number)
    assert job.wait()[0] == "CANCELLED"
    wait_until(lambda: not slurm("squeue", "--noheader"), job.told)
    assert job.restarts == 0


# Failed


def test_a_killed_rank_ends_the_job_before_the_watchdog_would(site: Site) -> None:
    job = site.submit(site.fill_in("cpu-openmpi" if site.mpi == "openmpi" else "cpu-mpich"), nodes=2, ranks=1, out="killed", TINY_SLOW="0.08")  # fmt: skip  # noqa: E501
    job.wait_for_step(3)
    os.kill(job.ranks()[-1], signal.SIGKILL)
    state, code = job.wait(seconds=WATCHDOG / 2)
    assert state == "FAILED"
    assert code not in (0, 85)
    assert "training failed with exit code" in job.told()
    assert job.restarts == 0


@pytest.mark.parametrize("template", ["own", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_a_failing_training_script_gives_its_exit_code(openmpi: Site, template: str) -> None:
    script = openmpi.fill_in("cpu-openmpi" if template == "own" else template)
    shape = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", f"--job-name=exits-{template}")
    settings = ("--data", "tiny:exits", "--out", openmpi.home / "exits")
    done = openmpi.sbatch("--wait", "--parsable", *shape, script, *settings)
    log = openmpi.home / f"exits-{template}-{done.stdout.strip()}.log"
    assert done.returncode == 7, log.read_text()
    assert log.read_text().count("leaving") == 1, "output of one rank only"
    assert "training failed with exit code 7" in log.read_text()


@pytest.mark.parametrize(
    ("mpi", "kind"), [("openmpi", "pmi2"), pytest.param("openmpi", "none", marks=pytest.mark.slow), ("mpich", "none")]
)
def test_tasks_that_do_not_see_each_other_are_refused(request: pytest.FixtureRequest, mpi: str, kind: str) -> None:
    site: Site = request.getfixturevalue(mpi)
    script = site.fill_in("cpu-openmpi")
    script.write_text(script.read_text().replace("--mpi=pmix", f"--mpi={kind}"))
    job = site.submit(script, nodes=2, ranks=1, out=f"alone-{kind}")
    state, code = job.wait()
    assert (state, code != 0) == ("FAILED", True), job.told()
    fitting = "pmix" if mpi == "openmpi" else "pmi2"
    assert job.told().count(f"srun --mpi={kind} started 2 tasks") <= 1
    assert f"start it with srun --mpi={fitting}" in job.told()
    assert not job.out.exists()


# Looked at


def test_doctor_under_srun(site: Site) -> None:
    kind = "pmix" if site.mpi == "openmpi" else "pmi2"
    command = ["srun", "--nodes=4", "--ntasks=4", "--cpus-per-task=1", f"--mpi={kind}", "mpisparse", "doctor", "--json"]
    told = subprocess.run(command, env=site.environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert told.returncode == 0, told.stderr
    facts = json.loads(told.stdout)
    assert facts["mpi"]["ranks"] == "4 on n1 (1), n2 (1), n3 (1), n4 (1)"
    assert facts["mpi"]["launcher"] == "srun"
    assert facts["mpi"]["pmi"].startswith(kind)
    assert facts["mpi"]["binding"]
    assert facts["slurm"]["nodes"] == "4: n[1-4]"
    assert facts["slurm"]["tasks"] == "4"
    assert "warning" not in facts["mpi"]
