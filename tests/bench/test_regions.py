"""The table of regions says what was found, and fails where a layer is not five regions."""

from dsi.passes import pipeline

from bench import regions


def test_a_layer_of_bert_is_five_regions(capsys):
    assert regions.main(["--models", "BERT", "--hits"]) == 0
    printed = capsys.readouterr().out
    assert "| BERT | encode | 4 linear, 1 attention | 2 row, 1 embedding, 1 linear | 0 |" in printed
    assert "6 lift.linear" in printed


def test_a_layer_that_is_not_fused_fails(monkeypatch):
    stages = [s for s in pipeline.PIPELINE if s.name != "fuse"]
    monkeypatch.setattr("dsi.compiler.backend.PIPELINE", stages)
    assert regions.main(["--models", "BERT"]) == 1
