"""A layer's kernels in a trace of replays."""

from lab.timeline import Span, idle_us, spans_of


def _trace(pause):
    """Two layers of three kernels; the second kernel is another queue's and ends last."""
    events = []
    for layer in range(2):
        at = 100.0 + layer * (10 + pause)
        for start, lasts, name, stream in ((0, 4, "a", 7), (2, 7, "b", 9), (3, 5, "c", 7)):
            args = {"stream": stream}
            events.append(
                {"cat": "kernel", "ts": at + start, "dur": lasts, "name": name, "args": args}
            )
    return events


def test_the_fastest_replay_counts():
    slow = [event | {"ts": event["ts"] - 1000} for event in _trace(5)]
    copies = [{"cat": "gpu_memcpy", "ts": 0, "dur": 1, "name": "copy", "args": {}}]
    spans = spans_of([*_trace(0), *slow, *copies], 2, 2, 1)
    assert spans == [
        Span(0, 0, 4, 4, "a"),
        Span(1, 2, 9, 5, "b"),
        Span(0, 3, 8, 0, "c"),
    ]


def test_idle_time_is_that_between_all_kernels():
    spans = [Span(0, 0.0, 4.0, 4.0, "a"), Span(1, 1.0, 2.0, 0.0, "b"), Span(0, 5.5, 7.0, 3.0, "c")]
    assert idle_us(spans) == 1.5
    assert idle_us([Span(0, 0.0, 4.0, 4.0, "a"), Span(0, 3.0, 5.0, 1.0, "early")]) == 0.0
