"""The command `view`: what it prints, what it serves, how it ends, and how bad input is answered."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from click.testing import CliRunner, Result

from multihead import masks
from multihead.cli import main, view
from multihead.observation.record import Record
from multihead.viewer.payload import RecordedRun
from multihead.viewer.routes import Viewer
from tests.record.test_merging import of_heads
from tests.viewer.watching import watch


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["view", *args], prog_name="multihead", env={"COLUMNS": "100", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("view") / "run.safetensors"
    watch(20, layers=2, mask=masks.Causal()).save(target)
    return target


class Started:
    """The command in a process of its own, once it has printed its address."""

    def __init__(self, *args: str, before: str = "") -> None:
        command = [sys.executable, "-c", f"from multihead.cli import main; {before}main()", "view", *args]
        environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        # If it prints nothing, the test reads the end of its output.
        self.patience = threading.Timer(120, self.process.kill)
        self.patience.daemon = True
        self.patience.start()
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline() for _ in range(3)]
        found = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w-]{20,}/)", self.lines[1])
        assert found is not None, self.lines
        self.port, self.path = int(found[1]), found[2]

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", self.path + path)
        response = connection.getresponse()
        found = response.status, response.read()
        connection.close()
        return found

    def end(self) -> tuple[int, str, str]:
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=30)
        self.patience.cancel()
        return self.process.returncode, out, err


def test_it_says_its_address_serves_the_page_and_ends_at_once_and_cleanly_in_the_middle_of_a_long_computation(
    file: Path, tmp_path: Path
) -> None:
    slow = (
        "import time; from multihead.viewer import routes; "
        "routes.describe_sample = lambda *given: print('begun', flush=True) or time.sleep(60); "
    )
    other = tmp_path / "run.safetensors"
    watch(20, layers=2, lengths=(20, 7), mask=masks.Causal(), seed=1).save(other)
    started = Started(str(file), str(other), "--no-browser", before=slow)
    assert started.lines[0] == f"Showing {file}, {other} at\n"
    assert started.lines[2] == "Only this machine can open it. Press Ctrl-C to stop.\n"
    assert started.get("")[0] == 200
    status, body = started.get("api/view")
    assert status == 200
    assert [each["name"] for each in json.loads(body)["runs"]] == [str(file), str(other)]
    assert started.get("api/runs/1/samples/1/heads/1/0/tile?level=0&row=0&column=0")[0] == 200
    with socket.create_connection(("127.0.0.1", started.port)) as client:
        request = f"GET {started.path}api/runs/0/samples/0 HTTP/1.1\r\nHost: 127.0.0.1:{started.port}\r\n\r\n"
        client.sendall(request.encode())
        assert started.process.stdout is not None
        assert started.process.stdout.readline() == "begun\n"
        began = time.monotonic()
        assert started.end() == (0, "", "")
        assert time.monotonic() - began < 20


def test_the_sample_to_open_stands_in_the_address_and_the_words_are_chinese(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []

    def serve(site: Viewer, *, ready: Callable[[str], None], **_: object) -> None:
        served.append(site.lang)
        ready("http://host/")

    monkeypatch.setattr("multihead.cli.serving.serve", serve)
    target = tmp_path / "两.safetensors"
    watch(20, lengths=(20, 7)).save(target)
    result = run(str(target), "--no-browser", "--sample", "1", "--lang", "zh")
    assert (result.exit_code, served) == (0, ["zh"])
    assert result.stdout.startswith("正在显示 两.safetensors：\n  http://host/#t=1\n")


def test_the_browser_is_opened_unless_it_should_not_be(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str, int, int]] = []

    def open_page(address: str) -> None:
        place = Path(url2pathname(urlsplit(address).path))
        modes = (place.stat().st_mode & 0o777, place.parent.stat().st_mode & 0o777)
        opened.append((address, place.read_text(encoding="utf-8"), *modes))

    monkeypatch.setattr("webbrowser.open", open_page)
    monkeypatch.setattr("multihead.cli.serving.serve", lambda site, *, ready, **options: ready("http://127.0.0.1:1/t/"))
    result = run(str(file))
    assert result.exit_code == 0, result.output
    # The token of the address is on no command line: the browser is given a file that only this user can read.
    ((address, page, mode, of_folder),) = opened
    assert address.startswith("file:///")
    assert "http" not in address
    assert '<meta http-equiv="refresh" content="0; url=http://127.0.0.1:1/t/">' in page
    assert (mode, of_folder) == (0o600, 0o700)
    assert not Path(url2pathname(urlsplit(address).path)).parent.exists()
    assert result.stdout.startswith("Showing run.safetensors at\n  http://127.0.0.1:1/t/\n")
    run(str(file), "--no-browser")
    assert len(opened) == 1


def test_help_shows_examples_and_loads_no_server() -> None:
    script = (
        "import sys\nfrom multihead.cli import main\n"
        "try:\n    main(['view', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name in sys.modules for name in ('starlette', 'uvicorn', 'rich', 'multihead.viewer')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "multihead view run.safetensors" in done.stdout
    assert "side by side" in done.stdout


def test_a_missing_package_is_named_and_how_to_install_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("starlette", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run(str(file))
    assert result.exit_code == 2
    assert result.stderr == (
        'error: The viewer needs starlette and uvicorn, which are not installed. Run pip install "multihead[view]".\n'
    )


def test_bad_input_is_one_sentence(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.safetensors").write_text("no record")
    Path("empty.safetensors").write_bytes(b"")
    watch(5, keep="summary").save("sums.safetensors")
    cases = [
        ((), "Missing argument 'RECORD...'. See `multihead view --help`."),
        (("none.safetensors",), "There is no file 'none.safetensors'."),
        (("text.safetensors",), "'text.safetensors' "),
        (("empty.safetensors",), "'empty.safetensors' "),
        ((".",), "'.' "),
        (
            ("sums.safetensors",),
            (
                "sums.safetensors has no single samples, only sums over all of them. "
                'Observe with keep="cpu", or print its table in Python.'
            ),
        ),
        ((str(file), "--sample", "3"), "There is no sample 3 in run.safetensors, which has 1. Leave out --sample."),
        ((str(file), "--port", "0"), "Invalid value for '--port': 0 is not in the range 1<=x<=65535."),
    ]
    for args, sentence in cases:
        result = run(*args, "--no-browser")
        assert result.exit_code == 2, args
        assert result.stdout == ""
        assert result.stderr.startswith(f"error: {sentence}"), result.stderr
        assert result.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_one_sentence(file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run(str(file), "--no-browser", "--port", str(port))
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: Port {port} is already in use. Give another --port, or leave it out to use a free one.\n"
    )


def test_a_module_with_masks_of_the_user_is_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("masks_for_view.py").write_text("imported = True\n", encoding="utf-8")
    assert run("missing.safetensors", "--import", "masks_for_view").exit_code == 2
    assert sys.modules.pop("masks_for_view").imported
    result = run("missing.safetensors", "--import", "no_such_masks")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: There is no module 'no_such_masks': No module named 'no_such_masks'. Give --import the name of a "
        "module in this folder or in the environment, such as my_masks.\n"
    )


def test_a_record_opened_by_the_command_is_what_was_saved(file: Path) -> None:
    (one,) = view._load_records([str(file)])
    assert one.name == "run.safetensors"
    assert one.levels_folder == file.with_name("run.safetensors.levels")
    assert isinstance(one.record, Record)


def test_the_browsers_file_is_removed_where_the_command_is_terminated(file: Path) -> None:
    started = Started(str(file), before="import webbrowser; webbrowser.open = lambda a: print(a, flush=True); ")
    assert started.process.stdout is not None
    place = Path(url2pathname(urlsplit(started.process.stdout.readline().strip()).path))
    assert place.exists()
    started.process.terminate()
    started.process.communicate(timeout=60)
    started.patience.cancel()
    assert started.process.returncode == 128 + signal.SIGTERM
    assert not place.parent.exists()


def test_a_files_name_cannot_act_on_the_terminal(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihead.cli.serving.serve", lambda site, *, ready, **options: ready("http://host/"))
    target = tmp_path / "\x1b[2J[red]\u202erun"
    target.write_bytes(file.read_bytes())
    assert run(str(target), "--no-browser").stdout.startswith("Showing \\x1b[2J[red]\\u202erun at\n")


@pytest.mark.parametrize("quoted", [True, False])
def test_the_files_of_ranks_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, quoted: bool) -> None:
    """Also where the shell has expanded the pattern."""
    shown: list[object] = []
    monkeypatch.setattr("multihead.cli.serving.serve", lambda site, **options: shown.extend(site.runs))
    files = [tmp_path / f"run.{rank}.safetensors" for rank in (0, 1)]
    for rank, file in enumerate(files):
        of_heads(2 * rank).save(file)
    result = run(str(tmp_path / "run.*.safetensors")) if quoted else run(*map(str, files))
    assert result.exit_code == 0, result.output
    (one,) = shown
    assert isinstance(one, RecordedRun)
    assert (one.record.layers[0].num_heads, one.keeps_weights(0)) == (4, True)
    assert one.levels_folder is not None
    assert one.levels_folder.parent == tmp_path
    assert "*" not in one.levels_folder.name
    alone = run(str(files[1]))
    assert alone.exit_code != 0
    assert "together they hold heads 2 to 3 of 4" in alone.output
    watch(4).save(tmp_path / "whole.safetensors")
    mixed = run(str(files[1]), str(tmp_path / "whole.safetensors"))
    assert "Some of the records are from single ranks, and others are complete." in mixed.output
