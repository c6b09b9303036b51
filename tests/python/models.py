"""Small models of transformers with random weights, and their batches."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

VOCABULARY = 211


def t5(dropout=0.0, **extra):
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=dropout,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **extra,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def t5v11(dropout=0.0):
    return t5(dropout, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def gpt2(dropout=0.0):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(dropout=0.0):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attention_dropout=dropout,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixtral(dropout=0.0):
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=4, attention_dropout=dropout,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


MODELS = {"t5": t5, "t5v11": t5v11, "gpt2": gpt2, "llama": llama, "mixtral": mixtral}


def batch(kind, step, micro, rows=4, length=12):
    """The batch of a micro-batch: a dict of tensors for the model's forward."""
    generator = torch.Generator().manual_seed(step * 1000 + micro)
    ids = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    if not kind.startswith("t5"):
        return {"input_ids": ids, "labels": ids.clone()}
    labels = torch.randint(2, VOCABULARY, (rows, 7), generator=generator)
    labels[:, -2:] = -100
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make(kind, dropout=0.0):
    """A model in training mode, with the same weights in every process."""
    torch.manual_seed(0)
    return MODELS[kind](dropout).train()
