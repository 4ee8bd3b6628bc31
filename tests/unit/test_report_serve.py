"""mpisparse report --serve: a run that goes on, on this host alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fabricated import by_hand, evaluation, make_run
from page_of_runs import serving

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.cli import main
from mpisparse.runtime.report.serve import PageServer, make_server


def append(run: Path, *records: object) -> None:
    with (run / "metrics.jsonl").open("a") as lines:
        lines.writelines(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)


def get(server: PageServer, path: str = "", **headers: str) -> tuple[int, str, str]:
    """Return the status, the tag and the text of an answer."""
    request = urllib.request.Request(server.address + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, answer.headers["ETag"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("ETag", ""), error.read().decode()


def data(text: str) -> Any:
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


def test_new_steps_are_served(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [by_hand(1)])
    with serving(run) as server:
        status, tag, text = get(server)
        assert (status, data(text)["live"] > 0) == (200, True)
        assert data(text)["runs"][0]["tables"]["steps"]["x.steps"] == [1]
        assert get(server, "", **{"If-None-Match": tag})[0] == 304
        append(run, by_hand(2), evaluation(2, 0.5), '{"kind": "event", "st')
        status, newer, text = get(server, "", **{"If-None-Match": tag})
        assert (status, newer != tag) == (200, True)
        assert data(text)["runs"][0]["tables"]["steps"]["x.steps"] == [1, 2]
        append(run, 'ep": 2, "event": "resume"}\n', json.dumps(by_hand(3)))
        text = get(server)[2]
        assert text.count("resume") == 2, "a line that was written in two parts is one event, in its list and its row"
        assert data(text)["runs"][0]["tables"]["steps"]["x.steps"] == [1, 2], "a line without an end may not be whole"
        append(run, "\n", by_hand(2), by_hand(3, loss=9.0))
        assert data(get(server)[2])["runs"][0]["tables"]["steps"]["loss"] == [1, 1, 9], "resumed after step 1"


def test_a_run_that_begins_again_is_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [by_hand(i) for i in (1, 2, 3)])
    with serving(run) as server:
        assert data(get(server)[2])["axes"]["steps"]["range"] == [0, 3]
        for records in ([by_hand(7)], [by_hand(8, time=123.0), *(by_hand(i) for i in range(9, 30))]):
            (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            steps = data(get(server)[2])["runs"][0]["tables"]["steps"]["x.steps"]
            assert steps == [record["step"] for record in records]


def test_runs_without_a_step_are_waited_for(tmp_path: Path) -> None:
    begun, silent = make_run(tmp_path / "begun", [by_hand(1)]), make_run(tmp_path / "silent", [])
    (tmp_path / "empty").mkdir()
    with serving(silent, tmp_path / "empty") as server:
        text = get(server)[2]
        assert "Waiting for the first step of silent, empty." in text
        assert data(text)["runs"] == []
    with serving(begun, silent) as server:
        assert "Waiting for the first step of silent." in get(server)[2]
        append(silent, by_hand(1))
        text = get(server)[2]
        assert "Waiting" not in text
        assert [run["name"] for run in data(text)["runs"]] == ["begun", "silent"]


def test_damage_is_told_and_may_be_repaired(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [by_hand(1)])
    with serving(run) as server:
        whole = (run / "metrics.jsonl").read_text()
        append(run, "no JSON\n", by_hand(2))
        for _ in range(2):
            status, _, text = get(server)
            assert (status, "in line 2 of" in text) == (503, True)
        (run / "metrics.jsonl").write_text(whole + json.dumps(by_hand(2)) + "\n")
        assert get(server)[0] == 200
        (run / "config.toml").write_text("a = = 1")
        assert "expected TOML" in get(server)[2]


def test_only_this_host_and_only_the_page(tmp_path: Path) -> None:
    """A page elsewhere could give its own name this host's address; files are not served at all."""
    run = make_run(tmp_path / "run", [by_hand(1)])
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert get(server, Host="evil.example:80")[0] == 403
        assert get(server, Host="localhost:1234")[0] == 200
        for path in ("metrics.jsonl", "../../etc/passwd", "%2e%2e/config.toml"):
            assert get(server, path)[0] == 404
        assert get(server, "?x=1")[0] == 200
        request = urllib.request.Request(server.address, method="HEAD")
        with urllib.request.urlopen(request, timeout=600) as answer:
            assert (answer.status, answer.read()) == (200, b"")


def test_what_cannot_be_served_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [by_hand(1)])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"expected a free port, got {port} \(.*\); choose another with --port"
        ):
            make_server([run], port)
        assert main(["report", str(run), "--serve", "--port", str(port)]) == 2
    for port in (-1, 65536):
        with pytest.raises(ConfigurationError, match="expected a port from 0 to 65535"):
            make_server([run], port)
    (tmp_path / "bench.jsonl").write_text('{"bench": "sync"}\n')
    with pytest.raises(ConfigurationError, match=r"--serve shows runs while they go on, got .*bench\.jsonl, a file"):
        make_server([tmp_path / "bench.jsonl"], 0)
    with pytest.raises(ConfigurationError, match="nothing that exists"):
        make_server([tmp_path / "nowhere"], 0)
    capsys.readouterr()
    for words, said in (
        (["--serve", "--out", "x.html"], "--serve writes no file"),
        (["--serve", "--pictures", "x"], "--serve writes no file"),
        (["--port", "1"], "--port needs --serve"),
    ):
        assert main(["report", str(run), *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    run = make_run(tmp_path / "run", [by_hand(1)])
    command = [sys.executable, "-m", "mpisparse", "report", str(run), "--serve", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        said = process.stdout.readline()
        assert said.startswith("report: http://127.0.0.1:")
        with urllib.request.urlopen(said.split()[1], timeout=600) as answer:
            assert b"run" in answer.read()
        os.kill(process.pid, number)
        assert process.wait(timeout=600) == 0
        assert process.stderr.read() == ""
    assert {path.name for path in run.iterdir()} == {"config.toml", "metrics.jsonl"}, "it writes no file"
