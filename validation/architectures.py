"""Every architecture of the installed transformers at tiny size: its graph compared with the model itself.

    python validation/architectures.py [--kinds causal masked seq2seq image classification] [--models llama ...] [--out FILE]

Each is built from the defaults of its config class, made small, without dropout; traced in float64 (float32 where experts
have no kernel for it); and run for two steps next to the module in the same process: loss, gradients and buffers. One line
per architecture (equal, refused with the reason, or wrong), then the counts. A process of its own runs each, so that what
dies or does not end is counted, too. Exits with 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from stagewright.errors import StagewrightError
from stagewright.execution.model_comparison import differences, tolerance_of
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.from_config import _KINDS
from stagewright.tracing.models.reference import ModelReference, resolve

LIMIT_S = 180
NUM_LAYERS, VOCABULARY = 4, 128
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(hidden_size|d_model|n_embd|embed_dim|dim|d_embed|embedding_size|word_embed_proj_dim|decoder_hidden_size)", 32),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|d_inner)|n_inner|d_ff|dim_feedforward", 64),
    (r"(num_(hidden_|decoder_|encoder_)?layers|n_layers?|(en|de)coder_layers)", NUM_LAYERS),
    (r"((en|de)coder_)?(num_)?attention_heads|num_(attention_)?heads|n_heads?|(en|de)coder_num_attention_heads", 4),
    (r"num_key_value_heads|multi_query_group_num|num_kv_heads", 2),
    (r"(attention_)?head_dim|d_kv|d_head|v_head_dim|qk_nope_head_dim", 8),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"rotary_dim", 4),
    (r"(n|num|topk)_groups?|num_expert_groups?", 1),
    (r"moe_k", 2),
    (r"expand", 1),
    (r"mamba_d_ssm", 64),
    (r"(q|kv)_lora_rank", 16),
    (r"(.*_)?vocab_size(_or_config_json_file)?", VOCABULARY),
    (r"n_positions|n_ctx|max_seq_len(gth)?|max_(source|target)_positions|max_position_embeddings", 64),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|num_selected_experts", 2),
    (r"mamba_(num|n)_heads", 8),
    (r"mamba_(head_dim|d_head)|mamba_d_state|(ssm_)?state_size", 8),
)  # fmt: skip
_DROPOUT = re.compile(
    r"(^|_)(dropout|pdrop|dropout_prob|drop_path_rate|layerdrop|layer_drop|jitter_noise)($|_)"
)


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """A config with its sizes made small, in its parts, too."""
    small = {key: value for key, value in config.items() if key != "per_layer_config"}
    layers = config.get("num_hidden_layers")
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = tiny(value)
        elif (
            isinstance(value, list)
            and value
            and (len(value) == layers or key.endswith(("layer_types", "block_type")))
        ):
            small[key] = (value * NUM_LAYERS)[:NUM_LAYERS]
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif _DROPOUT.search(key):
            small[key] = 0.0
        elif key.endswith("token_id"):
            small[key] = min(value, VOCABULARY - 1)
        else:
            small[key] = next((size for name, size in SIZES if re.fullmatch(name, key)), value)
    if "kv_lora_rank" in config and "num_key_value_heads" in config:  # latent attention has a key per head
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def architectures(kinds: list[str], models: list[str]) -> list[tuple[str, str, str]]:
    """Kind, model type and class of each."""
    listed = []
    for kind in kinds:
        for model_type, names in sorted(_KINDS[kind][1].items()):
            name = names if isinstance(names, str) else names[0]
            if model_type in CONFIG_MAPPING and (not models or model_type in models):
                listed.append((kind, model_type, name))
    return listed


def judge(model_type: str, name: str) -> tuple[str, str]:
    """The verdict on one architecture, and the reason."""
    try:
        config = tiny(CONFIG_MAPPING[model_type]().to_dict())
    except Exception as error:
        return "not built", _line(error)
    config |= {"architectures": [name], "model_type": model_type}
    for ending, key, value in (
        ("ImageClassification", "image_size", 32),
        ("SequenceClassification", "pad_token_id", 0),
    ):
        if name.endswith(ending) and config.get(key) is None:
            config[key] = value
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        reference = resolve(folder, {})
        verdict = _compared(reference, "float64")
        return _compared(reference, "float32") if "no float64 kernel" in verdict[1] else verdict


def _compared(reference: ModelReference, dtype: str) -> tuple[str, str]:
    try:
        graph = trace(reference, 2, 32, dtype, use_cache=False)
        differing = differences(lambda: build(reference, 2, 32, dtype), graph, tolerance=tolerance_of(graph))
    except StagewrightError as error:
        refused_by = ("transformers cannot build", "is refused by transformers")
        is_size = any(phrase in str(error) for phrase in refused_by)
        return ("not built" if is_size else "refused"), _line(error)
    return ("wrong", str(differing[0])) if differing else ("equal", dtype)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _judged(connection: Any, model_type: str, name: str) -> None:
    warnings.simplefilter("ignore")
    try:
        verdict = judge(model_type, name)
    except Exception as error:
        verdict = "fault", f"{type(error).__name__}: {_line(error)}"
    connection.send(verdict)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds", nargs="*", default=["causal", "masked", "seq2seq", "image", "classification"]
    )
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--out", type=Path, help="a JSON Lines file of the verdicts")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for kind, model_type, name in architectures(options.kinds, options.models):
        ours, theirs = context.Pipe()
        process = context.Process(target=_judged, args=(theirs, model_type, name))
        process.start()
        theirs.close()
        try:
            verdict, reason = ours.recv() if ours.poll(LIMIT_S) else ("timed out", f"after {LIMIT_S} s")
        except EOFError:
            verdict, reason = "died", f"exit code {process.exitcode}"
        process.kill()
        process.join()
        counts[kind, verdict] += 1
        print(f"{kind:8} {model_type:28} {name:44} {verdict}: {reason}", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps([kind, model_type, name, verdict, reason]) + "\n")
    print(f"transformers {transformers.__version__}")
    for (kind, verdict), count in sorted(counts.items()):
        print(f"{kind:8} {verdict:10} {count}")
    sys.exit(any(verdict in ("wrong", "died", "fault") for _, verdict in counts))


if __name__ == "__main__":
    main()
