"""The demo and its page: complete, self-contained, repeatable, and with numbers that hold."""

import base64
import re
from html.parser import HTMLParser
from importlib import import_module

import pytest
import torch
from torch import nn

from net2gp.errors import InputError
from net2gp.report import Figure, Section, Table, demo, page
from net2gp.report.tools import Stopwatch, mlp, shown, train

DEMO = import_module("net2gp.report.demo")
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Structure(HTMLParser):
    """The tags that are open, those that were closed wrongly, all attributes and all text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.attributes, self.tags, self.text = [], [], [], set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The demo's folder and its sections by title, from one run."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    sections = {}

    def recording(scene):
        def run():
            found = scene()
            sections.update({section.title: section for section in found})
            return found

        return run

    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        scenes = {name: recording(scene) for name, scene in DEMO.SCENES.items()}
        patch.setattr(DEMO, "SCENES", scenes)
        state, threads = torch.get_rng_state(), torch.get_num_threads()
        path = demo(folder)
        assert torch.equal(torch.get_rng_state(), state), "the global random state is left alone"
        assert torch.get_num_threads() == threads
    assert path == folder / "index.html"
    return folder, sections


def cells(section, row, column):
    """A number of a section's table."""
    table = section.table
    place = table.head.index(column)
    found = next(line[place] for line in table.rows if line[0] == row)
    return float(found.rstrip("%"))


def find(made, start):
    return next(section for title, section in made[1].items() if title.startswith(start))


def test_every_figure_is_a_file_and_is_inlined_in_the_page(made):
    folder, sections = made
    text = (folder / "index.html").read_text(encoding="utf-8")
    figures = {figure.name: figure for s in sections.values() for figure in s.figures}
    assert len(figures) == 6
    for name, figure in figures.items():
        assert (folder / f"{name}.png").read_bytes() == figure.png
        assert figure.png.startswith(b"\x89PNG")
        assert base64.b64encode(figure.png).decode() in text


def test_the_page_is_well_formed_and_asks_nothing_of_the_network(made):
    text = (made[0] / "index.html").read_text(encoding="utf-8")
    structure = Structure(text)
    assert (structure.open, structure.wrong) == ([], [])
    assert not structure.tags & {"script", "link", "iframe"}
    for tag, name, value in structure.attributes:
        if name in ("src", "href"):
            assert value.startswith("data:image/png;base64,"), (tag, value[:40])
    assert "url(" not in text
    assert "@import" not in text
    assert ("meta", "name", "viewport") in structure.attributes
    assert "prefers-color-scheme: dark" in text


def test_every_section_has_text_code_and_timings(made):
    for title, section in made[1].items():
        assert section.code, title
        assert "n2g." in section.code, title
        assert section.seconds, title
        assert all(value >= 0 for value in section.seconds.values())
        assert len(section.text.split()) > 30, title


def test_the_intervals_hold_in_the_gap_where_the_network_alone_does_not(made):
    section = find(made, "Regression: intervals")
    column = "95% interval, in the gap"
    for process in ("GP with zero mean", "GP around the network"):
        assert cells(section, "network", column) < 90 < cells(section, process, column)
    assert cells(section, "GP with zero mean", "NLL") < cells(section, "network", "NLL")


def test_the_deviation_in_the_gap_exceeds_that_at_the_data(made):
    text = " ".join(find(made, "Regression: uncertain").text.split())
    at_data, inside = re.search(
        r"is (\d\.\d+) on average at the data and reaches (\d\.\d+)", text
    ).groups()
    assert float(inside) > 3 * float(at_data)


def test_the_process_around_the_network_is_better_calibrated(made):
    section = find(made, "Classification")
    for column in ("NLL", "ECE", "Brier"):
        gp, network = (cells(section, n, column) for n in ("GP around the network", "network"))
        assert gp < network, column


def test_the_variance_of_f_knows_strangers_better_than_the_entropy(made):
    section = find(made, "Strangers")
    for column in ("rotated by 90°", "noise"):
        variance = cells(section, "GP with zero mean: variance of f", column)
        assert variance > 0.95
        assert variance > cells(section, "network: entropy", column)


def test_training_separates_the_classes_in_the_kernel(made):
    section = find(made, "The kernel")
    trained, before = (cells(section, n, "difference") for n in ("trained", "at initialization"))
    assert trained > before > 0


def test_adapted_tasks_are_nearer_to_the_truth_than_the_source_network(made):
    section = find(made, "Transfer")
    for task in range(1, 5):
        column = f"RMSE task {task}"
        assert cells(section, "GP, closed form", column) < cells(section, "source network", column)
    losses = {row[0]: cells(section, row[0], "mean NLL") for row in section.table.rows}
    assert min(losses, key=losses.get) == "GP, closed form"


def test_a_second_run_gives_the_same_numbers_and_figures(made, tmp_path, monkeypatch):
    again = []
    scene = DEMO.SCENES["transfer"]
    monkeypatch.setattr(DEMO, "SCENES", {"transfer": lambda: again.extend(scene()) or again})
    demo(tmp_path)
    first = find(made, "Transfer")
    assert again[0].table == first.table
    assert again[0].figures == first.figures


def test_an_unwritable_folder_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    def never():
        raise AssertionError("computed in vain")

    monkeypatch.setattr(DEMO, "SCENES", {"any": never})
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write into the folder .*file.*Pass another one"):
        demo(tmp_path / "file")


def test_text_in_a_page_is_escaped_and_only_backticks_are_marked():
    table = Table(("a<b", "c"), (("<i>", "1 & 2"),), "a `note`")
    text = page("T < U", "lead & more", [Section("S", "x < y\n\n`code < 1`", (), "a < b", table)])
    structure = Structure(text)
    assert (structure.open, structure.wrong) == ([], [])
    assert "i" not in structure.tags
    assert "<code>code &lt; 1</code>" in text
    assert "<pre><code>a &lt; b</code></pre>" in text
    for piece in ("T < U", "lead & more", "x < y", "a<b", "<i>", "1 & 2"):
        assert piece in structure.text


def test_small_figures_stand_beside_their_text_and_wide_ones_above():
    figure = lambda width: Figure("f", b"png", "an <alt>", width)
    small = page("t", "", [Section("s", "text", (figure(400),))])
    wide = page("t", "", [Section("s", "text", (figure(900),))])
    assert '<div class="beside">' in small
    assert '<div class="above">' in wide
    assert 'alt="an &lt;alt&gt;"' in small


def test_shown_code_is_the_body_without_docstring_and_return():
    def example(a, b):
        """Not shown."""
        total = a + b  # with its comment
        if total > 3:
            total = 3
        return total

    assert shown(example) == ("total = a + b  # with its comment\nif total > 3:\n    total = 3")


def test_a_stopwatch_adds_up_steps_of_the_same_name():
    watch = Stopwatch()
    for _ in range(2):
        with watch("step"):
            sum(range(1000))
    first = watch.seconds["step"]
    with watch("step"):
        sum(range(100_000))
    assert list(watch.seconds) == ["step"]
    assert watch.seconds["step"] > first > 0


def test_training_fits_and_moves_only_what_requires_gradients():
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 20)[:, None]
    network = mlp(1, 10, 1)
    network[0].requires_grad_(False)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    loss = nn.functional.mse_loss
    start = float(loss(network(x), x).detach())
    train(network, (x, x), loss, steps=200)
    assert float(loss(network(x), x).detach()) < 0.05 * start
    assert not network.training
    moved = [name for name, value in network.state_dict().items() if not value.equal(before[name])]
    assert moved == ["2.weight", "2.bias"]
