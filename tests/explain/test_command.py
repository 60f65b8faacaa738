"""`dsi explain`: what it reads, the tables it prints, the page it writes."""

import json
import re
import subprocess
import sys

import pytest
import transformers
from typer.testing import CliRunner

from dsi.__main__ import app

FILE = """
import torch
model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)).eval()
inputs = {inputs}
"""


def run(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


@pytest.mark.parametrize("inputs", ["(torch.randn(3, 8),)", "[torch.randn(3, 8)]", "dict(input=torch.randn(3, 8))"])
def test_a_file_with_model_and_inputs(tmp_path, inputs):
    file = tmp_path / "small.py"
    file.write_text(FILE.format(inputs=inputs))
    result = run(file, "--html", tmp_path / "pages" / "small.html")
    assert result.exit_code == 0, result.output
    row = r"1\s+linear\s+layer_norm \+ linear\s+gemv\s+\S+ B\s+\S+ \w*FLOP\s+\S+ µs\s+\S+% \(\w+\)"
    assert re.search(row, result.output), result.output
    page = (tmp_path / "pages" / "small.html").read_text()
    assert "<title>dsi: small</title>" in page and "small.py" not in re.findall(r"<h1>(.*?)</h1>", page)[0]


def test_a_file_with_neither(tmp_path):
    (tmp_path / "wrong.py").write_text("model = 3\n")
    result = run(tmp_path / "wrong.py")
    assert result.exit_code == 1 and "no `model` with `inputs`" in result.output


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            transformers.T5Config(vocab_size=199, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
            "attention",
        ),
        (
            transformers.BertConfig(
                vocab_size=199,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                architectures=["BertForSequenceClassification"],
            ),
            "tanh",
        ),
    ],
)
def test_a_configuration_of_another_kind(tmp_path, config, words):
    config.save_pretrained(tmp_path)
    result = run(tmp_path, "--length", "5", "--dump", tmp_path / "dump")
    assert result.exit_code == 0, result.output
    assert words in result.output and list(tmp_path.glob("dump/graph_000/kernels/*.py"))


def test_a_configuration_of_any_size_takes_no_memory(tmp_path):
    """70 billion parameters, of which none is made."""
    config = transformers.LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, num_attention_heads=64)
    config.vocab_size = 4_000_000
    config.save_pretrained(tmp_path)
    result = run(tmp_path / "config.json", "--length", "3")
    assert result.exit_code == 0 and "GB" in result.output


def test_a_configuration_that_takes_no_ids(tmp_path):
    transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48).save_pretrained(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 1 and "does not run on token ids alone" in result.output and "example()" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no file or folder"),
        ("{", "transformers makes no configuration of"),
        ("{}", "transformers makes no configuration of"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path, text, words):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    result = run(tmp_path / "config.json")
    assert result.exit_code == 1 and f"dsi: {words}" in result.output and "token ids" not in result.output


def test_a_file_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "lies_beside.py").write_text(FILE.format(inputs="(torch.randn(3, 8),)"))
    (tmp_path / "small.py").write_text("from lies_beside import inputs, model\n")
    result = run(tmp_path / "small.py")
    assert result.exit_code == 0 and "layer_norm + linear" in result.output, result.output


def test_the_module_is_a_command_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 31}))
    command = [sys.executable, "-m", "dsi", "explain", "config.json", "--html", "page.html"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "layer_norm + linear + gelu_tanh" in result.stdout
    assert f"<title>dsi: {tmp_path.name}</title>" in (tmp_path / "page.html").read_text()


def test_a_page_that_cannot_be_written(tmp_path):
    file = tmp_path / "small.py"
    file.write_text(FILE.format(inputs="(torch.randn(3, 8),)"))
    result = run(file, "--html", tmp_path)
    assert result.exit_code == 1 and f"dsi: the page cannot be written to {tmp_path}: Is a directory" in result.output


def test_an_argument_by_the_name_of_options(tmp_path):
    file = tmp_path / "named.py"
    file.write_text("import torch\nmodel = lambda x, options: x * options\ninputs = dict(x=torch.ones(2), options=2.0)\n")
    result = run(file)
    assert result.exit_code == 1 and "an argument by the name of options" in result.output
