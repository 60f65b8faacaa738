"""`dsi generate`: streamed text equals what generate makes; options; sentences for what cannot be found or done."""

import shutil
import subprocess
import sys

import pytest
import torch
import transformers
import zoo
from dsi.engine import text
from dsi.ir.errors import DsiError
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from typer.testing import CliRunner

from bench import models
from dsi.__main__ import app

PROMPT = "What is a compiler? It"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with random weights, and a real tokenizer, whose tokens join to words."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = models.smollm2_tokenizer()
    config = zoo.decoder_configs()["llama"]
    config.vocab_size, config.num_hidden_layers = len(tokenizer), 1
    config.bos_token_id, config.eos_token_id, config.pad_token_id = tokenizer.bos_token_id, None, tokenizer.pad_token_id
    torch.manual_seed(0)
    models.hot(transformers.LlamaForCausalLM(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(*arguments, **kwargs):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], **kwargs)


def expected(folder, **settings):
    model, tokenizer = text.load(folder, "fp32", "cpu")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=8, **settings)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True)


def test_greedy_text_is_eagers_compiled_or_not(folder):
    eager = expected(folder, do_sample=False)
    assert len(eager.split()) > 2
    for arguments in ([], ["--eager", "--temperature", 0]):
        result = run(folder, PROMPT, "-n", 8, *arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout == eager + "\n"
        assert result.stderr.splitlines()[-1].startswith("8 tokens in ")


def test_sampling_is_repeated_by_its_seed(folder):
    texts = [run(folder, "-", "-n", 8, "--eager", "--temperature", 2, "--seed", seed, input=PROMPT).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_options_reach_the_generation():
    config = GenerationConfig(temperature=0.3, top_k=9, do_sample=True)
    text.Sampling().apply(config)
    assert (config.do_sample, config.temperature, config.top_k) == (False, GenerationConfig().temperature, GenerationConfig().top_k)
    text.Sampling(top_k=3, top_p=0.5, min_p=0.1, temperature=0.7, repetition_penalty=1.2).apply(config)
    assert (config.do_sample, config.top_k, config.top_p, config.min_p, config.temperature) == (True, 3, 0.5, 0.1, 0.7)
    assert config.repetition_penalty == 1.2


def test_text_is_handed_on_as_it_is_made(folder):
    model, tokenizer = text.load(folder, "fp32", "cpu")
    parts = []
    made = text.stream(model, tokenizer, PROMPT, parts.append, max_new_tokens=8, compiled=False)
    assert len([part for part in parts if part]) > 2 and "".join(parts) == made.text and len(made.times) == 8
    assert made.times == sorted(made.times) and len(made.times) == 8 and made.rate > 0


def test_a_chat_template(folder):
    model, tokenizer = text.load(folder, "fp32", "cpu")
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    text.stream(model, tokenizer, "Hello", lambda part: None, max_new_tokens=1, chat=True, compiled=False)
    assert "<|im_start|>user\nHello<|im_end|>" in tokenizer.decode(seen[0][0])
    tokenizer.chat_template = None
    with pytest.raises(DsiError, match=r"no chat template"):
        text.stream(model, tokenizer, "Hello", lambda part: None, chat=True, compiled=False)


def test_dtype(folder):
    assert text.load(folder, "auto", "cpu")[0].dtype == torch.float32
    assert text.load(folder, "bf16", "cpu")[0].dtype == torch.bfloat16
    with pytest.raises(DsiError, match=r"--dtype 'fp61'.*known: fp32"):
        text.load(folder, "fp61")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["./nowhere", "hi"], "dsi: there is no folder ./nowhere; give the folder of a model, or a hub id"),
        (["/no/where", "hi"], "dsi: there is no folder /no/where"),
        ([__file__, "hi"], "is a file; give the folder of a model"),
        (["org/nowhere", "hi"], "dsi: 'org/nowhere' is no folder here, and the hub gave no such model. HF_HUB_OFFLINE is set"),
        (["FOLDER", "hi"], "has no config.json"),
        (["BERT", "hi"], "cannot be loaded to generate text"),
        (["HEADLESS", "hi"], "lacks 1 weights that LlamaForCausalLM generates with (lm_head.weight, ...), which would be random"),
        (["MUTE", "hi"], "the tokenizer, which knows 1 tokens, finds none in the prompt"),
        (["SMOL", "hi", "--device", "mars"], "--device 'mars' names no device"),
        (["SMOL", "hi", "--dtype", "fp61"], "--dtype 'fp61'"),
        (["SMOL", ""], "the prompt holds no token"),
    ],
)
def test_mistakes_are_sentences(arguments, sentence, folder, tmp_path):
    transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path / "bert")
    llama, gpt2 = zoo.decoder_configs()["llama"], transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2)
    transformers.LlamaModel(llama).save_pretrained(tmp_path / "headless")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "headless")
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "mute")  # without a tokenizer
    places = {"SMOL": folder, "FOLDER": str(tmp_path)}
    places |= {name.upper(): str(tmp_path / name) for name in ("bert", "headless", "mute")}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 1 and not result.stdout
    assert sentence in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda file: file.write_bytes(file.read_bytes()[:-100]),
            "model.safetensors is damaged (Error while",
        ),
        (lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "model.safetensors is a pointer of git"),
        (lambda file: _rewrite(file, lambda name, value: (f"_orig_mod.{name}", value)), "it has _orig_mod.lm_head.weight instead"),
        (lambda file: _rewrite(file, lambda name, value: (name, value[:3])), "lm_head.weight is [3, 64] in the file and ["),
        (lambda file: (file.parent / "config.json").write_text("{"), "is not a valid JSON file"),
    ],
)
def test_what_is_wrong_with_a_folder_is_a_sentence(change, sentence, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    change(tmp_path / "copy" / "model.safetensors")
    result = run(tmp_path / "copy", "hi")
    assert result.exit_code == 1 and not result.stdout
    assert sentence in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


def _rewrite(file, change):
    changed = dict(change(name, value.clone()) for name, value in load_file(file).items())
    save_file({name: value.contiguous() for name, value in changed.items()}, file, metadata={"format": "pt"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_gpu_that_is_not_there(folder):
    assert "torch sees no CUDA GPU here" in run(folder, "hi", "--device", "cuda").stderr


def test_in_a_shell(folder):
    """The text alone on standard output, the rest on standard error."""
    command = [sys.executable, "-m", "dsi", "generate", folder, PROMPT, "-n", "3", "--eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.endswith("\n") and len(done.stdout.splitlines()) == 1
    assert done.stderr.startswith("3 tokens in ")


@pytest.mark.slow
def test_a_real_model(tmp_path):
    models.smollm2().save_pretrained(tmp_path)
    models.smollm2_tokenizer().save_pretrained(tmp_path)
    result = run(tmp_path, "What is a compiler? Answer in one sentence.", "--chat", "-n", 16)
    assert result.stdout.startswith("A compiler is a"), result.output
