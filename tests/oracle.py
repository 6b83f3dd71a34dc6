"""What transformers says: tiny random checkpoints and SmolLM2, with the logits and tokens it makes from them.

Made once into .models/oracle by a process of its own (`python -m tests.oracle`) and read by the tests of all ranks.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.launch import MODELS, ROOT, SMOLLM, environment

HOME = MODELS / "oracle" / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
STEPS, MANY = 8, 64
TINY_PROMPTS = [[5], [7, 300, 2], [1, 2, 3, 4, 5, 6, 7], list(range(40, 52)), list(range(100, 120))]
TEXTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "2 + 2 =",
    "Name three colours.",
    "Why is the sky blue? Answer briefly.",
]

# sizes that divide by nothing: 10 query heads over 5 key/value heads, a vocabulary of 331, an ffn of 100
_SIZES = {
    "hidden_size": 80,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 8,
    "vocab_size": 331,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

# 9 heads that no small number but 3 divides; the first layer is dense, the others have 8 experts in 4 groups
_LATENT = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 9,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}

# name -> (class, options): architectures first, then variants of what a configuration can say
TINY = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    # experts that no small number of ranks divides; Qwen3's first and third layers are dense, Qwen2's second and fourth
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 44}
        | {"decoder_sparse_step": 2, "tie_word_embeddings": True, "use_sliding_window": False},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "norm_topk_prob": True}
        | {"mlp_only_layers": [0, 2], "tie_word_embeddings": False},
    ),
    "deepseek_v2": ("DeepseekV2", _LATENT | {"topk_method": "group_limited_greedy", "tie_word_embeddings": False}),
    "deepseek_v2-noq": ("DeepseekV2", _LATENT | {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True}),
    "deepseek_v3": ("DeepseekV3", _LATENT | {"norm_topk_prob": True, "num_nextn_predict_layers": 0}),
    "deepseek_v3-yarn": (
        "DeepseekV3",
        _LATENT | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, "num_nextn_predict_layers": 0},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
}


# long sequences over several ranks: prompts around a block of 8 positions on up to 4 ranks, and MANY steps
LENGTHS = (1, 3, 2, 4, 8, 16, 17, 24, 25, 32, 33, 97)
_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
CONTEXT = {
    "context-llama-8-2": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True}),
    "context-llama-9-3": ("Llama", {"tie_word_embeddings": False} | _HEADS),
    "context-qwen3": ("Qwen3", {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "context-window": ("Mistral", {"sliding_window": 11}),
    "context-deepseek_v2": TINY["deepseek_v2"],
    "context-deepseek_v3": TINY["deepseek_v3"],
    "context-moe": ("Qwen3Moe", TINY["qwen3_moe"][1] | {"num_attention_heads": 8, "num_key_value_heads": 2}),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint, prompts (token ids), and what transformers makes of them: logits [prompts, STEPS, vocab] fp32."""

    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: object


def ensure() -> None:
    """Make what is missing. Call it from one process at a time."""
    if not (HOME / "done").exists():
        subprocess.run([sys.executable, "-m", "tests.oracle"], cwd=ROOT, env=environment(), check=True)


def load(name: str) -> Case:
    from safetensors.torch import load_file

    facts = json.loads((HOME / f"{name}.json").read_text())
    path = SMOLLM if name == "smollm2" else HOME / name
    return Case(path, facts["prompts"], facts["tokens"], load_file(HOME / f"{name}.safetensors")["logits"])


def _answer(model, prompts, steps):
    """Greedy continuation of each prompt alone, with the logits of every step."""
    import torch

    logits, tokens = [], []
    with torch.inference_mode():
        for prompt in prompts:
            step, cache, rows = torch.tensor([prompt]), None, []
            for _ in range(steps):
                out = model(step, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                rows.append(out.logits[0, -1].float())
                step = rows[-1].argmax().reshape(1, 1)
            logits.append(torch.stack(rows))
            tokens.append([int(row.argmax()) for row in rows])
    return torch.stack(logits), tokens


def _keep(name, model, prompts, steps=STEPS):
    from safetensors.torch import save_file

    logits, tokens = _answer(model, prompts, steps)
    save_file({"logits": logits}, HOME / f"{name}.safetensors")
    (HOME / f"{name}.json").write_text(json.dumps({"prompts": prompts, "tokens": tokens}))


def main() -> None:
    import torch
    import transformers

    HOME.mkdir(parents=True, exist_ok=True)
    many = [[(7 * i + 3 * length) % 331 for i in range(length)] for length in LENGTHS]
    for index, (name, (kind, options)) in enumerate((TINY | CONTEXT).items()):
        torch.manual_seed(index)
        config = getattr(transformers, f"{kind}Config")(**_SIZES | options)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "norm" in key or "bias" in key:  # ones and zeros would hide a wrong one
                    value.uniform_(0.5, 1.5)
            for key, value in model.named_buffers():
                if "correction_bias" in key:
                    value.uniform_(-0.2, 0.2)
        model.save_pretrained(HOME / name, max_shard_size="200KB")
        _keep(name, model, *((many, MANY) if name in CONTEXT else (TINY_PROMPTS,)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM.parent, gguf_file=SMOLLM.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM.parent, gguf_file=SMOLLM.name, dtype=torch.float32)
    conversations = [[{"role": "user", "content": text}] for text in TEXTS]
    prompts = [
        tokenizer(
            tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True), add_special_tokens=False
        ).input_ids
        for talk in conversations
    ]
    _keep("smollm2", model.eval(), prompts)
    (HOME / "done").touch()


if __name__ == "__main__":
    main()
