"""Small configs of the zoo's architectures, for runs on a few CPU ranks."""

from __future__ import annotations

from typing import Any

from planner_core.models.zoo import ZOO

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
"""Small sizes in the words of most models of transformers that read text."""
LLAMA_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA_SIZES}
"""A config whose feed-forward part is no multiple of its width, as in most Llamas."""
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1024,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "tie_word_embeddings": False,
}
"""A config whose keys and values come from one small product, which tensor ranks do not split."""
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-3-8b", {**TEXT, **_TOKENS, "num_key_value_heads": 4}),
    "llama-gqa": (
        "llama-3-8b",
        {**TEXT, **_TOKENS, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gpt2": ("gpt2-xl", {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}),
    "bert": ("bert-large", TEXT),
    "t5": (
        "t5-large",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "vocab_size": 64,
        },
    ),
    "vit": (
        "vit-large",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 8,
        },
    ),
    "mixtral": (
        "mixtral-8x7b",
        {**TEXT, "num_key_value_heads": 4, "intermediate_size": 32, "num_local_experts": 4},
    ),
    "resnet": ("resnet50-100k", {"num_labels": 16, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}),
}
NAMES = tuple(_SIZES)


def tiny_config(name: str) -> dict[str, Any]:
    """Return a config of the same architecture, small."""
    zoo, sizes = _SIZES[name]
    return {**ZOO[zoo].config, **sizes}
