"""Does a run make the same text on every layout, and report and write what it should?"""

from __future__ import annotations

import json
import socket
import sys
from functools import cache

import pytest
import torch

from spmd import run
from spmd.control import job
from spmd.topology.mapping import Mapping
from tests import launch, tiny

LAYOUTS = [(1, ()), (2, ("--tp", "2")), (2, ("--pp", "2")), (3, ("--tp", "3")), (3, ("--pp", "3"))]
LAYOUTS += [(4, ("--tp", "2", "--pp", "2"))]
PROMPTS = [{"prompt": "hello"}, {"token_ids": [5]}, {"prompt": "a much longer text"}, {"token_ids": [1, 2, 3, 270]}]
COUNTS = [2, 1, 18, 4]  # "hell" is one token
STEPS = 9
RANDOM_WEIGHTS = "spmd: no --model: a tiny decoder with random weights (its text means nothing)"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("good") / "model", template=tiny.TEMPLATE)


@pytest.fixture
def command(monkeypatch, capfd):
    """Call the command in this process: (status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["spmd.run", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            job.run(run.main)
        return ended.value.code, *capfd.readouterr()

    return call


@pytest.fixture
def generated(command, model, tmp_path):
    """The tokens a run in this process makes."""

    def call(*arguments: object, model: object = model) -> list[list[int]]:
        status, _, err = command("--model", model, "--json", tmp_path / "out.json", *arguments)
        assert (status, err) == (0, "")
        return json.loads((tmp_path / "out.json").read_text())["tokens"]

    return call


# ---------------------------------------------------------------------- every layout


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Runs that draw tokens for mixed prompts, compare with one rank, and write everything: one per layout."""
    folder = tmp_path_factory.mktemp("made")
    prompts = tiny.lines(folder / "prompts.jsonl", *PROMPTS)

    @cache
    def call(ranks: int, sizes: tuple[str, ...]) -> tuple[object, dict, dict]:
        name = folder / "-".join(sizes or ["one"])
        options = ["--model", str(model), *sizes, "--prompts-file", prompts, "--max-tokens", str(STEPS), "--verify"]
        options += ["--temperature", "0.8", "--top-p", "0.9", "--seed", "7", "--microbatches", "3"]
        options += ["--json", f"{name}.json", "--trace", f"{name}.trace"]
        ended = launch.mpirun(ranks, "-m", "spmd.run", *options)
        assert ended.returncode == 0, ended.stderr
        return ended, *(json.loads(name.with_suffix(kind).read_text()) for kind in (".json", ".trace"))

    return call


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS)
def test_tokens_do_not_depend_on_the_layout(made, generated, tmp_path, ranks, sizes):
    _, document, _ = made(ranks, sizes)
    prompts = tiny.lines(tmp_path / "prompts.jsonl", *PROMPTS)
    options = ("--prompts-file", prompts, "--max-tokens", STEPS, "--temperature", 0.8, "--top-p", 0.9, "--seed", 7)
    assert document["tokens"] == generated(*options)
    assert [len(tokens) for tokens in document["tokens"]] == [STEPS] * len(PROMPTS)


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS)
def test_one_rank_agrees(made, ranks, sizes):
    ended, document, _ = made(ranks, sizes)
    assert "largest logit difference" in document["verify"]
    assert "0 tokens differ" in document["verify"]
    assert float(document["verify"].split()[3]) <= 2e-4
    assert document["verify"] in ended.stdout
    assert ended.stderr == ""


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS)
def test_document(made, model, ranks, sizes):
    ended, document, _ = made(ranks, sizes)
    size = dict(zip(sizes[::2], map(int, sizes[1::2]), strict=True))
    tp, pp = size.get("--tp", 1), size.get("--pp", 1)
    keys = ["communication", "dtype", "layout", "model", "peak_memory", "text", "timing", "tokens", "verify"]
    assert sorted(document) == keys
    assert document["model"] == str(model)
    assert document["dtype"] == "float32"
    assert document["layout"] == {"world": ranks, "tp": tp, "pp": pp, "cp": 1, "pp_partition": None}
    assert all(isinstance(text, str) for text in document["text"])
    assert len(document["text"]) == len(PROMPTS)
    timing = document["timing"]
    assert sorted(timing) == ["decode_tokens_per_s", "load_s", "prefill_tokens_per_s", "ttft_ms", "tune_s"]
    assert timing.pop("tune_s") >= 0  # nothing to tune on one rank, or all of it known
    assert all(value > 0 for value in timing.values())
    assert timing["prefill_tokens_per_s"] == pytest.approx(sum(COUNTS) / timing["ttft_ms"] * 1e3)
    assert 50e6 < document["peak_memory"] < 4e9
    rows = {(row["op"], row["group"]): row for row in document["communication"]}
    assert len(rows) == len(document["communication"])
    for row in document["communication"]:
        assert sorted(row) == ["bytes", "calls", "group", "op", "seconds"]
        assert row["calls"] > 0 and row["bytes"] > 0 and row["seconds"] > 0
    expected = {("all_reduce", "tp"), ("all_gather", "tp"), ("broadcast_int64", "tp")} if tp > 1 else set()
    assert set(rows) == expected | ({("send", "pp"), ("recv", "pp")} if pp > 1 else set())
    for (op, group), row in rows.items():
        assert f"{op} on {group}" in ended.stdout
        assert f"{row['calls']} calls" in ended.stdout


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS)
def test_trace(made, ranks, sizes):
    _, document, trace = made(ranks, sizes)
    events = trace["traceEvents"]
    names = [event for event in events if event["ph"] == "M"]
    assert [(e["pid"], e["name"], e["args"]["name"]) for e in names] == [
        (rank, "process_name", f"rank {rank}") for rank in range(ranks)
    ]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(names) + len(spans) == len(events)
    for span in spans:
        assert sorted(span) == ["args", "cat", "dur", "name", "ph", "pid", "tid", "ts"]
        assert sorted(span["args"]) == ["bytes", "group"]
        assert span["args"]["group"] == span["cat"] in ("tp", "pp")
        assert type(span["args"]["bytes"]) is int and span["args"]["bytes"] > 0
        assert span["ts"] >= 0 and span["dur"] >= 0
    for row in document["communication"]:
        pids = [span["pid"] for span in spans if (span["name"], span["cat"]) == (row["op"], row["group"])]
        assert max(map(pids.count, range(ranks))) == row["calls"]
    if ranks > 1:
        assert min(span["ts"] for span in spans) == 0
        assert {span["pid"] for span in spans} == set(range(ranks))


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS)
def test_texts_of_several_prompts(made, ranks, sizes):
    ended, document, _ = made(ranks, sizes)
    for index, text in enumerate(document["text"]):
        assert f"[{index}] {text}\n" in ended.stdout.replace("\r\n", "\n")
    assert "time to first token" in ended.stdout
    assert "decode" in ended.stdout
    assert ended.stdout.count("peak memory") == 1


# ---------------------------------------------------------------------- without a checkpoint


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_run_without_a_model(command, tmp_path, ranks):
    """The random weights are the same on every layout."""
    command("--max-tokens", 12, "--json", tmp_path / "one.json")
    ended = launch.mpirun(ranks, "-m", "spmd.run", "--max-tokens", "12", "--json", str(tmp_path / "many.json"))
    assert ended.returncode == 0
    assert ended.stderr.splitlines() == [RANDOM_WEIGHTS]
    one, many = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "many.json"))
    assert (many["tokens"], many["text"], many["model"]) == (one["tokens"], one["text"], None)
    assert f"world {ranks} tp {ranks} pp 1 cp 1" in ended.stdout
    assert ended.stdout.count("layout") == 1


def test_run_without_a_model_or_a_launcher():
    ended = launch.python("-m", "spmd.run", "--max-tokens", "3")
    assert (ended.returncode, ended.stderr.splitlines()) == (0, [RANDOM_WEIGHTS])
    assert "world 1 tp 1 pp 1 cp 1" in ended.stdout


def test_run_asks_no_network(command, monkeypatch):
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))
    status, _, err = command("--max-tokens", 2)
    assert (status, err) == (0, f"{RANDOM_WEIGHTS}\n")


# ---------------------------------------------------------------------- help and information


def test_help_is_printed_once():
    ended = launch.mpirun(2, "-m", "spmd.run", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("usage:") == 1
    assert all(f"--{word}" in ended.stdout for word in ("model", "pp-partition", "prompts-file", "verify", "trace"))


def test_info_of_two_stages(model):
    ended = launch.mpirun(2, "-m", "spmd.run", "--model", str(model), "--pp", "2", "--pp-partition", "2,1", "--info")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert "10 heads over 5 key/value heads of 4" in " ".join(ended.stdout.split())
    assert lines[-3:] == [
        ["rank", "pp", "tp", "cp", "layers", "heads", "kv", "heads"],
        ["0", "0", "0", "0", "0-1", "0-9", "0-4"],
        ["1", "1", "0", "0", "2-2", "0-9", "0-4"],
    ]


def test_info_reads_no_weights(command, model, tmp_path):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    status, out, err = command("--model", tmp_path, "--info")
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    for fact in ("llama, 3 layers, hidden 40", "ffn 52", "vocabulary 271", "context 64", "rope default"):
        assert fact in words


def test_info_without_a_model(command):
    status, out, err = command("--info")
    assert (status, err) == (0, "")
    assert "random weights: llama, 4 layers" in out


# ---------------------------------------------------------------------- prompts, sampling, ends


def test_token_ids_need_no_tokenizer(command, tmp_path):
    model, out = tiny.save(tmp_path / "model"), tmp_path / "out.json"
    (model / "tokenizer.json").unlink()
    prompts = tiny.lines(tmp_path / "p.jsonl", {"token_ids": [1, 2]})
    status, shown, err = command("--model", model, "--prompts-file", prompts, "--max-tokens", 4, "--json", out)
    assert (status, err) == (0, "")
    document = json.loads(out.read_text())
    assert document["text"] is None
    assert " ".join(map(str, document["tokens"][0])) in shown


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\u00e9"])
def test_a_text_may_hold_any_character(generated, tmp_path, separator):
    """JSON lines end at a newline and nowhere else."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": f"a{separator}b"}, ensure_ascii=False) + "\n")
    whole = generated("--prompts-file", tmp_path / "p.jsonl", "--max-tokens", 4)
    assert whole == generated("--prompt", f"a{separator}b", "--max-tokens", 4)


def test_blank_lines_and_windows_line_ends_are_no_prompts(generated, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'\r\n{"token_ids": [1]}\r\n\r\n{"token_ids": [2]}')
    assert len(generated("--prompts-file", tmp_path / "p.jsonl", "--max-tokens", 2)) == 2


def test_a_prompt_may_fill_the_context(generated, tmp_path):
    prompts = tiny.lines(tmp_path / "p.jsonl", {"token_ids": [1] * 60})
    assert len(generated("--prompts-file", prompts, "--max-tokens", 4)[0]) == 4


def test_prompts_do_not_change_one_another(generated, tmp_path):
    together = generated("--prompts-file", tiny.lines(tmp_path / "all.jsonl", *PROMPTS), "--max-tokens", 5)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        alone = generated("--prompts-file", tiny.lines(tmp_path / "p.jsonl", prompt), "--max-tokens", 5)
        assert alone == [expected]


def test_chat_wraps_the_prompt_in_the_template(generated):
    wrapped = generated("--chat", "--prompt", "hello", "--max-tokens", 6)
    assert wrapped == generated("--prompt", "[user]hello[answer]", "--max-tokens", 6)


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("several", [False, True])
def test_generation_ends_at_an_end_token(generated, tmp_path, where, several):
    model = tiny.save(tmp_path / "model")
    free = generated("--prompt", "hello", "--max-tokens", 8, model=model)[0]
    end = free[3]
    values = tiny.CONFIG if where == "config.json" else {}
    (model / where).write_text(json.dumps(values | {"eos_token_id": [9999, end] if several else end}))
    assert generated("--prompt", "hello", "--max-tokens", 8, model=model) == [free[: free.index(end) + 1]]
    assert generated("--prompt", "hello", "--max-tokens", 8, "--ignore-eos", model=model) == [free]


def test_a_seed_gives_the_same_text_and_another_seed_another(generated):
    options = ("--prompt", "hello", "--max-tokens", 20, "--temperature", 1, "--top-p", 0.95)
    first = generated(*options, "--seed", 1)
    assert generated(*options, "--seed", 1) == first
    assert generated(*options, "--seed", 2) != first


def test_sampling_with_a_tiny_top_p_is_greedy(generated):
    greedy = generated("--prompt", "hello", "--max-tokens", 20)
    assert generated("--prompt", "hello", "--max-tokens", 20, "--temperature", 1, "--top-p", 1e-9) == greedy
    assert generated("--prompt", "hello", "--max-tokens", 20, "--temperature", 1e-4) == greedy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_verify(command, model, dtype):
    status, out, err = command("--model", model, "--prompt", "hello", "--max-tokens", 4, "--dtype", dtype, "--verify")
    assert (status, err) == (0, "")
    assert "largest logit difference 0 (limit" in out
    assert "0 tokens differ" in out


# ---------------------------------------------------------------------- --verify finds what is wrong

WRONG = """
import torch
from spmd import run
from spmd.control import job
from spmd.models.decoder import Decoder

load = Decoder.load

def wrong(self, checkpoint):
    load(self, checkpoint)
    if job.launched_rank() == 1:
        self.layers[0].mlp.down_proj.weight.{change}

Decoder.load = wrong
job.run(run.main)
"""


@pytest.mark.parametrize(
    ("change", "sizes"),
    [("mul_(1.5)", ("--tp", "2")), ("mul_(1.5)", ("--pp", "2")), ("fill_(float('nan'))", ("--tp", "2"))],
)
def test_verify_finds_wrong_weights_of_one_rank(model, change, sizes):
    options = ("--model", str(model), *sizes, "--prompt", "hello", "--max-tokens", "4", "--verify")
    ended = launch.mpirun(2, "-c", WRONG.format(change=change), *options)
    ours = [line for line in ended.stderr.splitlines() if line.startswith("spmd: ")]
    assert ended.returncode == 4
    assert "Traceback" not in ended.stderr
    assert len(ours) == 1
    assert ours[0].startswith("spmd: --verify: largest logit difference ")
    assert float(ours[0].split()[5]) > 2e-4
    assert ours[0].removeprefix("spmd: --verify: ") in " ".join(ended.stdout.split())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("where", ["many", "alone", "both"])
def test_verify_does_not_agree_on_nan(dtype, where):
    from spmd.models.config import tiny as tiny_config
    from spmd.models.generate import Generation

    this = run.Job(run.options().parse_args(["--dtype", dtype]), None)
    this.mapping, this.config = Mapping(), tiny_config(1)
    broken, fine = torch.full((3, 5), float("nan")), torch.zeros(3, 5)
    many, alone = (broken if where in (side, "both") else fine for side in ("many", "alone"))
    line, agrees = this.compare([many.numpy()], Generation([[0, 0, 0]], logits=[list(alone)]))
    assert not agrees
    assert "difference 0 " not in line
