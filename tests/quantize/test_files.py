"""Quantised models on disk: whole, byte for byte, and nothing but what was written is read."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
import transformers
import zoo
from dsi.ir.errors import DsiError
from dsi.quantize import checksums
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.modules import QuantisedEmbedding, QuantisedLinear
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import dsi

IDS = torch.tensor([[3, 50, 7, 120]])


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def made(name: str) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(zoo.decoder_configs()[name])


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "opt"])
@pytest.mark.parametrize("tied", ["head", "both"])
def test_a_model_comes_back_byte_for_byte(tmp_path, name, tied):
    model = dsi.quantise_model(zoo.decoder(name, dtype=torch.bfloat16), tied=tied)
    dsi.save_quantised(model, tmp_path / "one.safetensors")
    loaded = dsi.load_quantised(lambda: made(name), tmp_path / "one.safetensors")
    assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers())) and not loaded.training
    assert torch.equal(logits(loaded), logits(model))
    dsi.save_quantised(loaded, tmp_path / "two.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    again = dsi.load_quantised(zoo.decoder(name), tmp_path / "two.safetensors")  # into a model that has other weights
    assert torch.equal(logits(again), logits(model))
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["one.safetensors", "two.safetensors"]


def test_names_are_the_models_own_whatever_is_around_it(tmp_path):
    model = dsi.quantise_model(zoo.decoder("llama"))
    wrapped = {"compiled": torch.compile(model, backend="eager"), "engine": dsi.init_inference(model, dtype=None)}
    parts = copy.copy(model)
    parts._modules = {**model._modules, "lm_head": torch.compile(model.lm_head, backend="eager")}
    for name, one in {"plain": model, **wrapped, "parts": parts}.items():
        dsi.save_quantised(one, tmp_path / name)
        assert (tmp_path / name).read_bytes() == (tmp_path / "plain").read_bytes()
    other = zoo.decoder("llama", seed=1)
    assert dsi.load_quantised(compiled := torch.compile(other, backend="eager"), tmp_path / "plain") is compiled
    assert torch.equal(logits(other), logits(model))


def test_a_module_that_is_called_in_several_places_comes_back_as_one(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.layers, self.first = nn.ModuleList([layer, layer]), layer[0]

    model = dsi.quantise_model(Model())
    dsi.save_quantised(model, tmp_path / "m")
    loaded = dsi.load_quantised(Model, tmp_path / "m")
    assert loaded.layers[0] is loaded.layers[1] and loaded.first is loaded.layers[0][0]
    assert torch.equal(loaded.first.weight, model.first.weight) and torch.equal(loaded.first.bias, model.first.bias)


def test_a_folder_is_no_place_for_a_file(tmp_path, saved):
    model = dsi.quantise_model(zoo.decoder("llama"))
    for path, words in ((tmp_path, "is a folder; name a file"), (tmp_path / "none" / "m", "cannot be written: no folder")):
        with pytest.raises(DsiError, match=words):
            dsi.save_quantised(model, path)
    with pytest.raises(DsiError, match="is a folder: give the file"):
        dsi.load_quantised(lambda: made("llama"), tmp_path)


def test_number_formats_come_back(tmp_path):
    model = zoo.decoder("llama")
    form = Format(Grouping("inner", 32), scales=torch.float16)
    dsi.quantise_model(model, format=form, skip=["lm_head"], activations="int8")
    dsi.save_quantised(model, tmp_path / "m")
    loaded = dsi.load_quantised(lambda: made("llama"), tmp_path / "m")
    assert type(loaded.lm_head) is nn.Linear
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            twin = loaded.get_submodule(name)
            assert isinstance(twin, QuantisedLinear)
            assert (twin.form, twin.group, twin.activations) == (form, 32, "int8") and repr(twin) == repr(module)
            assert twin.scales.dtype == module.scales.dtype and torch.equal(twin.scales, module.scales)
    assert torch.equal(logits(loaded), logits(model))


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    model = dsi.quantise_model(zoo.decoder("llama_tied"), tied="keep")
    dsi.save_quantised(model, tmp_path / "m")
    with safe_open(str(tmp_path / "m"), "pt") as file:
        assert sum(file.get_slice(key).get_shape() == [199, 64] for key in file.keys()) == 1  # noqa: SIM118
    loaded = dsi.load_quantised(lambda: made("llama_tied"), tmp_path / "m")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    both = dsi.quantise_model(zoo.decoder("llama_tied"), tied="both")
    dsi.save_quantised(both, tmp_path / "b")
    loaded = dsi.load_quantised(lambda: made("llama_tied"), tmp_path / "b")
    assert isinstance(loaded.model.embed_tokens, QuantisedEmbedding) and loaded.model.embed_tokens.head is loaded.lm_head


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "m.safetensors"
    dsi.save_quantised(dsi.quantise_model(zoo.decoder("llama")), path)
    return path


def changed(path, change, seal=True) -> None:
    """The file with other metadata and tensors, with right checksums where it is sealed."""
    with safe_open(str(path), "pt") as file:
        header, tensors = json.loads(file.metadata()["dsi"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    change(header, tensors)
    if seal:
        header["checksums"] = checksums.of_tensors(tensors)
        header["checksum"] = checksums.of_metadata(header)
    save_file(tensors, str(path), metadata={"dsi": json.dumps(header)})


def test_another_version_of_the_format_is_an_error_that_says_so(saved):
    changed(saved, lambda header, tensors: header.update(version=3))
    with pytest.raises(DsiError, match="has version 3 of the format, and this dsi reads versions 1 and 2"):
        dsi.load_quantised(lambda: made("llama"), saved)


def test_a_file_of_the_version_without_checksums_is_read(saved):
    def older(header, tensors):
        header.update(version=1)
        del header["checksums"], header["checksum"]

    expected = logits(dsi.load_quantised(lambda: made("llama"), saved))
    changed(saved, older, seal=False)
    assert torch.equal(logits(dsi.load_quantised(lambda: made("llama"), saved)), expected)


def test_a_bit_that_changed_is_found(saved):
    """Wherever it is: in the numbers of a tensor, which the error names, or in what the file says of them."""
    whole = saved.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8:length])
    model = zoo.decoder("llama")
    before = logits(model)
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.scales", "model.norm.weight"):
        place = length + entries[name]["data_offsets"][0] + 5
        saved.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DsiError, match=f"is damaged: the numbers of {re.escape(name)} are not those that were written"):
            dsi.load_quantised(model, saved)
    saved.write_bytes(whole.replace(rb"\"size\": 0", rb"\"size\": 1", 1))
    with pytest.raises(DsiError, match="is damaged: its metadata is not what was written"):
        dsi.load_quantised(model, saved)
    assert torch.equal(logits(model), before)


def test_what_is_no_such_file_is_refused(tmp_path):
    with pytest.raises(DsiError, match="does not exist"):
        dsi.load_quantised(lambda: made("llama"), tmp_path / "none")
    (tmp_path / "text").write_text("no tensors here, whatever the name says")
    with pytest.raises(DsiError, match="is no safetensors file"):
        dsi.load_quantised(lambda: made("llama"), tmp_path / "text")
    save_file({"a": torch.ones(2)}, str(tmp_path / "plain"))
    with pytest.raises(DsiError, match="was not written by save_quantised"):
        dsi.load_quantised(lambda: made("llama"), tmp_path / "plain")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda h, t: t.pop("model.norm.weight"), r"it has no model\.norm\.weight"),
        (lambda h, t: t.update(more=torch.ones(2)), "LlamaForCausalLM has no more"),
        (lambda h, t: t.update({"model.norm.weight": torch.ones(3)}), r"model\.norm\.weight is \[3\] there and \[64\]"),
        (lambda h, t: h["linears"]["lm_head"].update(shape=[200, 64], scales=[200]), r"lm_head\.weight is \[200, 64\] there"),
        (lambda h, t: h["linears"].update(tail=h["linears"]["lm_head"]), "has no module tail"),
        (lambda h, t: t.pop("lm_head.scales"), r"it has no lm_head\.scales"),
        (lambda h, t: t.update({"lm_head.scales": torch.ones(7)}), r"lm_head\.scales is \[7\] there"),
        (lambda h, t: h["linears"]["lm_head"].update(bias="float32"), "lm_head has a bias there, and none in the model"),
        (lambda h, t: t.update({"lm_head.weight": t["lm_head.weight"].float()}), r"lm_head\.weight is F32 there, not I8"),
        (lambda h, t: t.update({"lm_head.scales": t["lm_head.scales"].half()}), r"lm_head\.scales is F16 there, not F32"),
        (lambda h, t: t.update({"model.norm.weight": t["model.norm.weight"].int()}), r"model\.norm\.weight is I32 there, not BF16 or"),
        (lambda h, t: h["linears"].update({"model.norm": h["linears"]["lm_head"]}), r"model\.norm\.weight is \[199, 64\] there and None"),
        (lambda h, t: h["aliases"].update({"lm_head.weight": "nothing"}), "damaged: it has no nothing"),
        (lambda h, t: h.pop("aliases"), "damaged: in its metadata, aliases: field required"),
        (lambda h, t: h["linears"]["lm_head"].pop("group"), r"damaged: in its metadata, linears\.lm_head\.group: field required"),
        (lambda h, t: h["linears"]["lm_head"].update(group=32), r"\[199\] scales are not those of a weight \[199, 64\] with 32 entries"),
        (lambda h, t: h["linears"]["lm_head"].update(size=7), "damaged: .* a grouping by rows has no size"),
        (lambda h, t: h["linears"]["lm_head"].update(activations="int4"), "damaged: .* known are '', 'int8'"),
        (lambda h, t: h["tables"].update({"model.embed_tokens": {"head": "tail", "dtype": "float32", "padding_idx": 0}}), "int8 of tail"),
        (lambda h, t: h.update(version=True), "has version True of the format"),
    ],
)
def test_a_file_of_another_model_is_refused_before_the_model_is_touched(saved, change, words):
    changed(saved, change)
    model = zoo.decoder("llama")
    before = logits(model)
    with pytest.raises(DsiError, match=words):
        dsi.load_quantised(model, saved)
    assert torch.equal(logits(model), before)


def test_a_model_whose_linears_have_biases_is_another(saved):
    with pytest.raises(DsiError, match=r"\.down_proj has no bias there, and one in the model"):
        dsi.load_quantised(lambda: made("llama_bias"), saved)


def test_what_is_no_model_is_refused(saved):
    with pytest.raises(DsiError, match="a module or a function that makes one, and was given a str"):
        dsi.load_quantised("llama", saved)
    with pytest.raises(DsiError, match="returned a NoneType"):
        dsi.load_quantised(lambda: None, saved)


def test_a_structure_that_computes_a_tensor_by_itself_must_be_given_whole(saved):
    def with_table():
        model = made("llama")
        model.table = torch.arange(3)  # neither parameter nor buffer: on the meta device it has no numbers, and the file has none either
        return model

    with pytest.raises(DsiError, match=r"has no numbers for .*table.*not on the meta device"):
        dsi.load_quantised(with_table, saved)
    dsi.load_quantised(with_table(), saved)


def test_a_model_on_the_meta_device_is_not_saved(tmp_path):
    with pytest.raises(DsiError, match="on the meta device"):
        dsi.save_quantised(dsi.quantise_model(zoo.decoder("llama")).to("meta"), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_save_pretrained_of_int8_is_an_error(tmp_path, saved):
    """It would write int8 under the names of floats, which from_pretrained reads as floats."""
    loaded = dsi.load_quantised(lambda: made("llama"), saved)
    quantised = dsi.quantise_model(zoo.decoder("llama"))
    engine = dsi.init_inference(zoo.decoder("llama"), dtype=torch.int8)
    for model in (quantised, quantised.model, copy.deepcopy(quantised), loaded, engine):
        with pytest.raises(DsiError, match=r"dsi\.save_quantised"):
            model.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    dsi.quantise_model(zoo.decoder("llama"), skip=["*"]).save_pretrained(tmp_path / "folder")
    assert list((tmp_path / "folder").glob("*.safetensors"))
