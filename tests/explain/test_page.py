"""The page of an explanation: what it holds, and that a reader's click, tap or key shows it."""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

import dsi

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser, chromium

LAYERS = 32


def configuration(layers=2):
    return transformers.LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )


def explained(layers):
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(configuration(layers)).eval()
        ids = torch.zeros((1, 7), dtype=torch.long)
    return dsi.explain(model, input_ids=ids, use_cache=False)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    torch._dynamo.reset()
    file = tmp_path_factory.mktemp("page") / "llama.html"
    explained(3).html(file, title="Llama")
    return file


@pytest.fixture
def browser():
    """Opens pages; for tests marked `browser`."""
    path = chromium()
    if path is None:
        pytest.skip("no Chromium: on Debian `apt-get install chromium` (make's set-up does it where it may)")
    opened = []

    def open_(width, height):
        opened.append(Browser(path, width, height))
        return opened[-1]

    yield open_
    for each in opened:
        each.__exit__()


def test_the_page_needs_nothing_else(page):
    text = page.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)|@import|url\(|https?://(?!www\.w3\.org)""", text)
    assert "<script>" in text and "<style>" in text


def test_what_a_region_shows(page):
    text = page.read_text()
    sections = dict(re.findall(r'<article class="detail" id="(g0-[\w]+)".*?>(.*?)</article>', text, re.DOTALL))
    attention = next(body for name, body in sections.items() if name.endswith("attention"))
    projection = next(body for name, body in sections.items() if "rms_norm + 3 linear" in body)
    assert "tl.dot" in attention and "triton" in attention
    for words in ("modeling_llama.py", "self_attn.q_proj", "rms_norm (rms_norm.py", "share of roofline", "anchor", "prologue"):
        assert words in projection, words


def test_equal_layers_are_folded(page):
    text = page.read_text()
    assert text.count("× 3") == 2  # in the picture before and in the one after
    assert len(re.findall(r'<a class="node attention" [^>]*data-name="region', text)) == 1
    assert "2 equal to it, drawn once" in text


def test_both_stacks_of_an_encoder_decoder_are_folded(tmp_path):
    """T5's first layers make the position biases of all, and its decoder's every layer reads the encoder."""
    sizes = dict(d_model=64, d_kv=16, d_ff=96, num_heads=4, num_layers=3, num_decoder_layers=4)
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=199, **sizes, decoder_start_token_id=0)).eval()
        ids = torch.zeros((1, 7), dtype=torch.long)
    text = dsi.explain(model, input_ids=ids, decoder_input_ids=ids, use_cache=False).html(tmp_path / "t5.html")
    pictures = re.findall(r'<svg class="picture.*?</svg>', text, re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        assert re.findall(r'<g class="frame"><rect [^>]*><text [^>]*>(.*?)</text></g>', picture) == ["× 3", "× 4"]
    assert len(re.findall('class="node attention"', pictures[0])) == 3  # of the encoder, of the decoder and between them
    assert len(text.encode()) < 3e6


@pytest.mark.slow
def test_a_model_of_32_layers_stays_small(tmp_path):
    explanation = explained(LAYERS)
    text = explanation.html(tmp_path / "large.html")
    assert len(explanation.regions) > 5 * LAYERS
    assert len(text.encode()) < 3e6 and f"× {LAYERS}" in text
    assert len(re.findall(r'class="node', text)) < 100


@pytest.mark.browser
def test_a_click_shows_source_and_kernel(page, browser):
    tab = browser(1280, 900)
    tab.open(page)
    shown = "document.querySelector('.detail.shown').innerText"
    tab.click("a.node.attention")
    text = tab.value(shown)
    assert "attention" in text and "tl.dot" in text and re.search(r"\.py:\d+", text)
    tab.click("a.node.embedding")
    other = tab.value(shown)
    assert other != text and "modeling_llama.py" in other
    assert tab.value("document.querySelectorAll('.detail.shown').length") == 1
    assert tab.value("location.hash").startswith("#g0-region")
    # The operators of the region are marked in the picture before, too.
    assert tab.value("document.querySelectorAll('a.node.chosen').length") >= 2
    wanted = [e["params"]["request"]["url"] for e in tab.events if e.get("method") == "Network.requestWillBeSent"]
    assert all(url.startswith(("file:", "about:", "data:")) for url in wanted)


@pytest.mark.browser
def test_a_key_shows_it_too(page, browser):
    tab = browser(1280, 900)
    tab.open(page)
    tab.value("document.querySelector('a.node.attention').focus()")
    tab.key("Enter", 13)
    assert "attention" in tab.value("document.querySelector('.detail.shown h3').innerText")
    tab.value("document.querySelector('a.node').focus()")
    tab.key("Tab", 9)
    assert tab.value("document.activeElement.classList.contains('node')")


@pytest.mark.browser
def test_an_address_opens_a_region(page, browser):
    name = re.search(r'href="#(g0-\w+attention)"', page.read_text()).group(1)
    tab = browser(1280, 900)
    tab.open(page, f"#{name}")
    assert tab.value("document.querySelector('.detail.shown').id") == name


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 800, 1280])
def test_it_fits_the_width(page, browser, width):
    tab = browser(width, 800)
    tab.open(page)
    assert tab.value("document.documentElement.scrollWidth") <= width
    tab.click("a.node.attention")
    tab.value("new Promise(r => setTimeout(r, 0))")
    box = tab.value("(() => { const r = document.querySelector('.detail.shown').getBoundingClientRect(); return [r.left, r.right]; })()")
    assert box[0] >= 0 and box[1] <= width
    assert tab.value("document.querySelector('.picture').getBoundingClientRect().width") > 200
    if width < 1000:  # the section is below the picture there
        tab.click(".detail.shown .back")
        assert tab.value("document.querySelector('.picture').getBoundingClientRect().top") < 800


def test_a_page_of_a_graph_that_was_stepped_aside_from():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text = dsi.explain(torch.nn.Linear(4, 4), torch.randn(2, 4)).html()
    assert "Not drawn" in text and "autocast is on" in text


def test_a_title_is_escaped():
    assert "<b>&" not in dsi.explain(lambda: 3).html(title="<b>&")
