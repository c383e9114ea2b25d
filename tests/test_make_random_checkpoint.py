import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM

from specprefill_jax.formats.safetensors import read_tensors
from specprefill_jax.models.checkpoint import iterate_tensors, parameter_specs
from specprefill_jax.models.config import read_config

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "make_random_checkpoint"


def make(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("random") / "tiny"
    done = make("--preset", "tiny", "--shard-mb", "1", out)
    assert done.returncode == 0, done.stderr
    return out


def test_transformers_computes_finite_logits_from_it(tiny: Path) -> None:
    model, loading = cast(Any, Qwen3_5ForCausalLM).from_pretrained(tiny, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        logits = model(torch.arange(100)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.float().std() > 0


def test_values_have_the_scales_of_initialization(tiny: Path) -> None:
    for key, array in iterate_tensors(tiny, read_config(tiny), np.float32):
        if key.endswith("A_log"):
            assert np.log(0.01) <= array.min() < array.max() <= np.log(16)
            continue
        center = 1.0 if key.endswith(("linear_attn.norm.weight", "dt_bias")) else 0.0
        # Noise of 0.02 on everything, so that a forgotten norm or bias shows; 0.11 is above 5 deviations.
        assert 0 < np.abs(array - center).max() < 0.11, key


def test_number_formats_are_those_of_the_release(tiny: Path) -> None:
    for key, tensor in read_tensors(tiny).items():
        is_f32 = key.endswith(("A_log", "linear_attn.norm.weight"))
        assert tensor.dtype == (np.float32 if is_f32 else ml_dtypes.bfloat16), key


def test_seed_decides_every_byte(tiny: Path, tmp_path: Path) -> None:
    make("--preset", "tiny", tmp_path / "same")
    make("--preset", "tiny", "--seed", "1", tmp_path / "other")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "same" / name).read_bytes() == (tiny / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (tiny / name).read_bytes()


def test_tokenizer_returns_any_text_and_its_ids_are_in_the_vocabulary(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "the <|im_start|>user\nZażółć 12 🙂\n\n  tail<|im_end|>"
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() <= read_config(tiny).vocab_size
    stop = read_config(tiny).eos_token_ids
    assert [tokenizer.id_to_token(token) for token in stop] == ["<|endoftext|>", "<|im_end|>"]


def test_shape_may_come_from_a_config(tiny: Path, tmp_path: Path) -> None:
    fields = json.loads((tiny / "config.json").read_text())
    fields.update(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    (tmp_path / "shape.json").write_text(json.dumps(fields))
    assert make("--config", tmp_path / "shape.json", tmp_path / "out").returncode == 0
    config = read_config(tmp_path / "out")
    assert config.num_hidden_layers == 2
    assert len(list(iterate_tensors(tmp_path / "out", config, np.float32))) == len(parameter_specs(config))


def test_existing_checkpoint_is_not_overwritten(tiny: Path) -> None:
    done = make("--preset", "tiny", tiny)
    assert done.returncode == 2
    assert "make_random_checkpoint: error:" in done.stderr
    assert "already holds safetensors" in done.stderr


def test_vocabulary_too_small_for_bytes_is_refused(tiny: Path, tmp_path: Path) -> None:
    fields = json.loads((tiny / "config.json").read_text())
    (tmp_path / "shape.json").write_text(json.dumps({**fields, "vocab_size": 100}))
    done = make("--config", tmp_path / "shape.json", tmp_path / "out")
    assert done.returncode == 2
    assert "vocab_size 100 is too small for a byte-level tokenizer; it needs 259" in done.stderr
