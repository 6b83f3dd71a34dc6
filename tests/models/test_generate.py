"""Does sampling follow its options, and does a prompt's result not depend on the others in its batch?"""

import pytest
import torch

from spmd import Mapping
from spmd.errors import InputError
from spmd.models.config import tiny
from spmd.models.decoder import Decoder
from spmd.models.generate import Sampling, generate, sample
from spmd.nn.attention import Chunk

LOGITS = torch.tensor([0.0, 4.0, 3.0, -1.0])


@pytest.fixture(scope="module")
def decoder():
    with torch.inference_mode():
        made = Decoder(tiny(8), Mapping(), torch.float32)
        made.randomise()
    return made


def test_greedy_takes_the_largest():
    assert sample(LOGITS, Sampling(1), 0, 0) == 1


def test_sampling_repeats_and_depends_on_seed_prompt_and_position():
    warm = Sampling(1, temperature=5.0, seed=3)
    drawn = [sample(LOGITS, warm, prompt, position) for prompt in range(4) for position in range(8)]
    assert drawn == [sample(LOGITS, warm, prompt, position) for prompt in range(4) for position in range(8)]
    assert drawn != [sample(LOGITS, Sampling(1, 5.0, seed=4), p, q) for p in range(4) for q in range(8)]
    assert len(set(drawn)) > 1


def test_top_p_keeps_the_likeliest_tokens_only():
    # softmax: 0.72 for token 1, 0.26 for token 2
    assert {sample(LOGITS, Sampling(1, 1.0, top_p=0.7), 0, i) for i in range(50)} == {1}
    assert {sample(LOGITS, Sampling(1, 1.0, top_p=0.9), 0, i) for i in range(200)} == {1, 2}


def test_a_batch_changes_nothing(decoder):
    prompts = [[1], [2, 3, 4], list(range(50)), [7] * 9]
    together = generate(decoder, prompts, Sampling(6)).tokens
    assert together == [generate(decoder, [prompt], Sampling(6)).tokens[0] for prompt in prompts]
    assert generate(decoder, prompts, Sampling(6), microbatches=3).tokens == together


def test_an_end_token_stops_its_prompt_alone(decoder):
    prompts = [[1], [2, 3, 4]]
    free = generate(decoder, prompts, Sampling(6)).tokens
    stop = free[0][2]
    stopped = generate(decoder, prompts, Sampling(6, eos=(stop,))).tokens
    expected = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in free]
    assert stopped == expected
    assert len(stopped[0]) <= 3


def test_a_prompt_in_two_chunks_gives_the_logits_of_one(decoder):
    ids = torch.arange(20)
    with torch.inference_mode():
        whole = decoder(ids, [Chunk(0, 0, 20)], decoder.new_caches(1, 20))
        caches = decoder.new_caches(1, 20)
        decoder(ids[:13], [Chunk(0, 0, 13)], caches)
        parts = decoder(ids[13:], [Chunk(0, 13, 7)], caches)
    torch.testing.assert_close(parts, whole)


def test_bad_prompts_are_refused_in_one_line(decoder):
    for prompts, text in (
        ([], "there is no prompt"),
        ([[1], []], "prompt 1 is empty"),
        ([[259]], "token ids outside 0 ... 258"),
        ([[1] * 2043], "2043 tokens, with 6 new ones more than the context of 2048"),
    ):
        with pytest.raises(InputError, match=text):
            generate(decoder, prompts, Sampling(6))


def test_a_full_cache_is_refused(decoder):
    with torch.inference_mode(), pytest.raises(InputError, match="KV cache of 4"):
        decoder(torch.arange(5), [Chunk(0, 0, 5)], decoder.new_caches(1, 4))
