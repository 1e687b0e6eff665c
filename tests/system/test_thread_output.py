"""Streams that keep what one thread writes: no other thread notices, whenever it prints."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
import threading

import pytest

from tensorlogic.system.thread_output import ThreadOutput, capture_output

IN_TURN = """
    import io, sys, threading, time
    from tensorlogic.system.thread_output import capture_output

    sys.setswitchinterval(1e-6)
    sys.stdout = here = io.StringIO()
    until = time.monotonic() + 2

    def work():
        while time.monotonic() < until:
            with capture_output("stdout", "stderr") as kept:
                print("mine")
            assert kept.getvalue() == "mine\\n", kept.getvalue()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    said = 0
    while time.monotonic() < until or said <= 100:
        print("here")
        said += 1
    for t in threads:
        t.join()
    assert sys.stdout is here
    assert here.getvalue() == said * "here\\n"
"""


@pytest.mark.slow
def test_who_prints_meanwhile_writes_every_line() -> None:
    """print holds no reference to its stream: the process crashed where a stream was freed under it."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IN_TURN)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stream_is_used_again_unless_somebody_keeps_it() -> None:
    def one() -> int:
        with capture_output("stdout"):
            return id(sys.stdout)

    first = one()
    assert one() == first
    with capture_output("stdout"):
        kept = sys.stdout
    assert isinstance(kept, ThreadOutput)
    assert id(kept) == first
    assert one() != first


def test_a_kept_stream_writes_to_where_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    before, later = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", before)
    with capture_output("stdout"):
        kept = sys.stdout
    monkeypatch.setattr(sys, "stdout", later)
    with capture_output("stdout") as text:
        print("here", file=kept)
    print("there", file=kept)
    assert (before.getvalue(), later.getvalue(), text.getvalue()) == ("here\nthere\n", "", "")


def test_streams_within_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    out = sys.stdout
    with capture_output("stdout") as outer:
        print("a")
        with capture_output("stdout") as inner:
            print("b")
            other = threading.Thread(target=print, args=("c",))
            other.start()
            other.join()
        print("d")
    assert (outer.getvalue(), inner.getvalue(), out.getvalue()) == ("a\nd\n", "b\n", "c\n")  # type: ignore[attr-defined]
    assert sys.stdout is out


def test_one_that_is_over_and_put_back_is_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who redirects in another thread may put back what stood there only for a while."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with capture_output("stdout"):
        with capture_output("stdout"):
            inner = sys.stdout
        outer = sys.stdout
    for left in (inner, outer, inner):
        monkeypatch.setattr(sys, "stdout", left)
        for _ in range(3):
            with capture_output("stdout") as text, capture_output("stdout"):
                print("kept", file=left)
            print("x")
        assert text.getvalue() == ""
    assert out.getvalue() == 9 * "kept\nx\n"


def test_no_stream_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as under pythonw
    with capture_output("stdout") as text:
        print("kept")
        left = sys.stdout
    assert text.getvalue() == "kept\n"
    assert sys.stdout is None
    assert left.write("gone") == 4
    left.flush()


def test_a_stream_answers_as_the_one_that_it_stands_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", real)
    with capture_output("stdout"):
        assert sys.stdout.buffer is real.buffer
