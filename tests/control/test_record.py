"""Do totals and timeline say what was done, and does Perfetto get a document it can read?"""

import json
from time import monotonic_ns

import pytest

from spmd.control.record import Recorder, perfetto

MS = 1_000_000


def test_totals_add_up_per_operation_and_group():
    recorder = Recorder()
    begin = monotonic_ns()
    recorder.add("all_reduce", "tp", 100, begin - 5 * MS)
    recorder.add("all_reduce", "tp", 28, begin - 6 * MS)
    recorder.add("all_reduce", "pp", 0, begin - 50 * MS)
    recorder.add("send", "pp", 7, begin)
    passed = monotonic_ns() - begin
    rows = {(row["op"], row["group"]): row for row in recorder.summary()}
    assert {key: (row["calls"], row["bytes"]) for key, row in rows.items()} == {
        ("all_reduce", "tp"): (2, 128),
        ("all_reduce", "pp"): (1, 0),
        ("send", "pp"): (1, 7),
    }
    assert 11 * MS <= round(rows["all_reduce", "tp"]["seconds"] * 1e9) <= 11 * MS + 2 * passed
    assert [row["seconds"] for row in recorder.summary()] == sorted(
        (row["seconds"] for row in rows.values()), reverse=True
    )
    assert recorder.summary()[0]["group"] == "pp"
    assert json.loads(json.dumps(recorder.summary())) == recorder.summary()


def test_events_are_kept_only_on_request_and_reset_empties_all():
    recorder = Recorder()
    recorder.add("send", "pp", 1, 0)
    assert recorder.events == []
    recorder.timeline = True
    begin = monotonic_ns()
    recorder.add("send", "pp", 2, begin)
    ((op, group, nbytes, start, end),) = recorder.events
    assert (op, group, nbytes, start) == ("send", "pp", 2, begin)
    assert begin <= end <= monotonic_ns()
    recorder.reset()
    assert (recorder.totals, recorder.events, recorder.summary()) == ({}, [], [])
    assert recorder.timeline


def test_recorders_share_nothing():
    Recorder().add("send", "pp", 1, 0)
    assert Recorder().totals == {}


def test_the_timelines_of_all_ranks_are_one_document():
    first = [("all_reduce", "tp", 64, 5_000_000, 5_002_500), ("send", "pp", 0, 5_004_000, 5_004_000)]
    third = [("recv", "pp", 8, 4_999_000, 5_010_000)]
    document = json.loads(json.dumps(perfetto([first, [], third])))
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) + len(names) == len(events)
    got = [(span["pid"], span["name"], span["cat"], span["ts"], span["dur"], span["args"]) for span in spans]
    assert got == [  # microseconds from the first start
        (0, "all_reduce", "tp", 1.0, 2.5, {"group": "tp", "bytes": 64}),
        (0, "send", "pp", 5.0, 0.0, {"group": "pp", "bytes": 0}),
        (2, "recv", "pp", 0.0, 11.0, {"group": "pp", "bytes": 8}),
    ]


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_a_run_without_events_is_a_document_too(ranks):
    events = perfetto([[] for _ in range(ranks)])["traceEvents"]
    assert [event["ph"] for event in events] == ["M"] * ranks
