"""An engine that ends while its audit is busy ends well: by itself, soon, and without noise."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

# A step that waits for a device: a thread is in C++, without the interpreter's lock.
BUSY = """
    import gc, logging, multiprocessing.util, signal, sys, time
    import torch
    from anymla.audit.auditor import Auditor
    from anymla.audit.process import JudgeProcess
    from anymla.audit.settings import Settings

    torch.set_num_threads(1)

    def made():
        x = torch.zeros(600, 600)
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            x = x @ x
        raise RuntimeError("nothing to judge")

    def work():
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        logging.getLogger("audit").addFilter(lambda record: record.levelno == logging.INFO)
        auditor = Auditor(Settings(every=1), logging.getLogger("audit"), {}, [JudgeProcess(1)])
        auditor.begin()
        for _ in range(12):
            auditor.submit_step(made)
        auditor.end(1)
        time.sleep(0.2)
        last = lambda: print("frozen:", gc.get_freeze_count() > 10_000, flush=True)
        multiprocessing.util.Finalize(None, last, exitpriority=0)

    if __name__ == "__main__":
        if sys.argv[1] == "main":
            work()
        else:
            child = multiprocessing.get_context(sys.argv[1]).Process(target=work)
            child.start()
            child.join()
            sys.exit(child.exitcode)
"""


def run(folder, code, *arguments):
    """Run a script; return what it and its children print, after it has ended well."""
    (folder / "engine.py").write_text(textwrap.dedent(code))
    paths = os.pathsep.join([p for p in sys.path if p])
    done = subprocess.run(
        [sys.executable, str(folder / "engine.py"), *arguments],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("start", ["main", "spawn", "fork"])
def test_a_busy_audit_does_not_abort_its_engine(tmp_path, start):
    """As ``std::terminate`` does with a daemon thread within torch when Python has ended."""
    said = run(tmp_path, BUSY, start)
    assert "terminate called" not in said
    assert "Traceback" not in said
    assert "audit: 1 of 1 steps, 0 alarms" in said
    # The interpreter does not look for cycles among a million objects as it ends.
    assert "frozen: True" in said


# Judges a case, before and after the terminal's Ctrl-C, which every process of the group gets.
INTERRUPTED = """
    import os, signal, time
    import torch
    from anymla.audit.case import Case
    from anymla.audit.packet import Packed
    from anymla.audit.process import JudgeProcess

    if __name__ == "__main__":
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        case = Case("slots", "layer 0", ["a"], [0], {}, {})
        judge = JudgeProcess(1)
        print(judge(Packed.of(case)))
        try:
            os.killpg(0, signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted")
        print(judge(Packed.of(case)))
        judge.close()
"""


def test_a_judge_ends_with_its_engine_and_not_by_ctrl_c(tmp_path):
    said = run(tmp_path, INTERRUPTED).splitlines()
    first, interrupted, second = said
    assert interrupted == "interrupted"
    assert first == second


def test_a_judge_that_is_ended_starts_no_other():
    from anymla.audit.case import Case
    from anymla.audit.packet import Packed
    from anymla.audit.process import JudgeProcess

    judge = JudgeProcess(1)
    judge.kill()
    with pytest.raises(OSError, match="was ended"):
        judge(Packed.of(Case("slots", "layer 0", ["a"], [0], {}, {})))


def test_closing_takes_no_longer_than_it_may():
    import logging
    import threading

    from anymla.audit.auditor import Auditor
    from anymla.audit.settings import Settings

    hold = threading.Event()
    auditor = Auditor(Settings(every=1), logging.getLogger("audit"), {})
    auditor.begin()
    auditor.submit_step(hold.wait)  # type: ignore[arg-type]
    began = time.monotonic()
    auditor.close(0.2)
    auditor.close()
    assert time.monotonic() - began < 2
    auditor.submit_step(hold.wait)  # type: ignore[arg-type]
    hold.set()
