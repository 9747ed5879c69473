"""Exports a checkpoint for OpenVINO GenAI: `convert_openvino.py MODEL_FOLDER OUT_FOLDER bf16|int8`.

Runs in the environment "convert". With int8, weights are compressed per channel, asymmetrically, as that project does.
"""

import sys
from pathlib import Path

import nncf
import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig
from transformers import AutoTokenizer


def main() -> None:
    """Entry point."""
    source, target, precision = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    # Without a configuration it would compress the weights of models with a billion and more.
    main_export(source, target, task="text-generation-with-past", ov_config=OVConfig())
    if precision == "int8":
        weights = target / "openvino_model.xml"
        model = openvino.Core().read_model(weights)
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        openvino.save_model(model, target / "int8.xml", compress_to_fp16=False)
        del model  # it maps the files that are replaced
        for suffix in (".xml", ".bin"):
            (target / "int8").with_suffix(suffix).replace(weights.with_suffix(suffix))
    # The pipeline asks for a tokenizer even though it is given token ids.
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    openvino.save_model(tokenizer, target / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, target / "openvino_detokenizer.xml")


if __name__ == "__main__":
    main()
