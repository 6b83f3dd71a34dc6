"""Are the options of the command the ones that scripts already use?"""

from spmd import run

OPTIONS = {
    "--model": None,
    "--tp": None,
    "--pp": None,
    "--cp": None,
    "--cp-type": "ulysses",
    "--kv-block": None,
    "--attn-dp": -1,
    "--moe-tp": -1,
    "--moe-ep": -1,
    "--moe-cluster": -1,
    "--dwdp": 0,
    "--policy": "cost",
    "--a2a": False,
    "--dense-dp": False,
    "--defer-mlp-sum": "on",
    "--padding": "none",
    "--input-scattered": False,
    "--pp-partition": None,
    "--prompt": None,
    "--prompts-file": None,
    "--chat": False,
    "--max-tokens": 32,
    "--ignore-eos": False,
    "--temperature": 0.0,
    "--top-p": 1.0,
    "--seed": 0,
    "--dtype": "float32",
    "--microbatches": None,
    "--verify": False,
    "--json": None,
    "--trace": None,
    "--info": False,
    "--costs": None,
    "--plan": False,
}


def test_the_options_and_their_defaults_are_frozen():
    actions = [action for action in run.options()._actions if action.dest != "help"]
    assert {action.option_strings[0]: action.default for action in actions} == OPTIONS
    assert all(len(action.option_strings) == 1 for action in actions)
    assert [action.option_strings for action in run.options()._actions if action.dest == "help"] == [["-h", "--help"]]


def test_the_dtypes_are_frozen():
    (dtype,) = [action for action in run.options()._actions if action.dest == "dtype"]
    assert list(dtype.choices) == ["float32", "bfloat16", "float16"]
