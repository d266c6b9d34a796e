from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from net2gp import data
from net2gp.errors import FileFormatError, InputError
from shared_data import shared_data, shared_reference


@pytest.fixture
def folder(monkeypatch):
    path = shared_data()
    monkeypatch.setenv("NET2GP_DATA", str(path))
    return path


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A data folder of this test's own."""
    monkeypatch.setenv("NET2GP_DATA", str(tmp_path))
    return tmp_path


def test_a_seed_gives_the_same_task_and_another_seed_another() -> None:
    one, again, other = data.sinusoid_task(3), data.sinusoid_task(3), data.sinusoid_task(4)
    assert torch.equal(one.x, again.x)
    assert torch.equal(one.y, again.y)
    assert one.amplitude != other.amplitude
    many = data.sinusoid_task(3, num_points=50)
    assert (many.amplitude, many.phase, many.frequency) == (one.amplitude, one.phase, one.frequency)


def test_sinusoids_follow_their_law() -> None:
    tasks = [data.sinusoid_task(seed, num_points=20) for seed in range(2000)]
    for values, low, high in (
        ([task.amplitude for task in tasks], 0.1, 5.0),
        ([task.phase for task in tasks], 0.0, 2 * np.pi),
        ([task.frequency for task in tasks], 0.5, 2.0),
        (torch.cat([task.x for task in tasks])[:, 0].tolist(), -5.0, 5.0),
    ):
        assert low <= min(values)
        assert max(values) <= high
        scale = (high - low) / np.sqrt(12)
        assert abs(np.mean(values) - (low + high) / 2) < 5 * scale / np.sqrt(2000)
        assert abs(np.std(values) / scale - 1) < 0.05
    noise = torch.cat([(t.y - t.truth(t.x)) / t.noise_var**0.5 for t in tasks])
    assert abs(float(noise.mean())) < 0.03
    assert abs(float(noise.std()) - 1) < 0.03


def test_the_gap_is_empty_and_both_sides_are_not() -> None:
    curve = data.snelson_like(seed=1, num_points=400)
    x = curve.x[:, 0]
    assert not ((x > curve.gap[0]) & (x < curve.gap[1])).any()
    assert (x < curve.gap[0]).sum() > 100
    assert (x > curve.gap[1]).sum() > 100
    noise = curve.y - curve.truth(curve.x)
    assert float(noise.var()) == pytest.approx(curve.noise_var, rel=0.2)


def test_synthetic_data_have_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        wide = data.snelson_like().data, data.sinusoid_task(0).data
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(tensor.dtype == torch.float64 for pair in wide for tensor in pair)
    narrow = data.snelson_like().data
    assert all(tensor.dtype == torch.float32 for tensor in narrow)
    torch.testing.assert_close(narrow[1], wide[0][1].float())


def test_digits_are_split_without_overlap_in_even_classes() -> None:
    pytest.importorskip("sklearn")
    (x, y), (x_test, y_test) = data.digits("train"), data.digits("test")
    assert x.shape == (1352, 1, 8, 8)
    assert x_test.shape == (445, 1, 8, 8)
    assert x.min() == 0
    assert x.max() == 1
    assert torch.equal(torch.bincount(y_test), torch.bincount(torch.cat([y, y_test])) // 4)
    train, test = ({tuple(row) for row in v.flatten(1).tolist()} for v in (x, x_test))
    assert len(train) == 1352
    assert not train & test


def test_digits_without_sklearn_say_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install net2gp\[plots\]"):
        data.digits()


def test_a_split_that_does_not_exist_is_refused(small) -> None:
    for load in (data.digits, data.mnist, data.cifar10):
        with pytest.raises(InputError, match="split must be 'train' or 'test', but is 'valid'"):
            load("valid")


def test_no_folder_says_to_set_the_variable(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("NET2GP_DATA", raising=False)
    with pytest.raises(InputError, match="Set the environment variable NET2GP_DATA"):
        data.mnist("test")
    monkeypatch.setenv("NET2GP_DATA", str(tmp_path / "none"))
    with pytest.raises(InputError, match="none, which is not a folder"):
        data.kmnist_test()


def test_a_missing_file_is_named(small) -> None:
    for load, name in (
        (data.mnist, "mnist.npz"),
        (data.fashion_mnist, "fashion_mnist.npz"),
        (data.usps, "usps.npz"),
        (data.kmnist_test, "kmnist_test.npz"),
        (data.notmnist, "notmnist.npz"),
        (data.cifar10, "cifar10.npz"),
        (data.california_housing, "california_housing.npz"),
        (data.summer_precipitation, "precip.npz"),
        (data.colorado_precipitation, "precip.npz"),
        (data.us_precipitation, "us_precip_apr1948.npz"),
        (data.malaria, "malaria_central_africa.npz"),
        (lambda: data.uci("yacht"), "yacht.npz"),
        (lambda: data.pretrained("resnet20_cifar10"), "resnet20_cifar10.npz"),
    ):
        with pytest.raises(InputError, match=f"{name}, but there is none.*NET2GP_DATA"):
            load()


def test_pickled_and_broken_and_incomplete_files_are_refused(small) -> None:
    np.savez(small / "mnist.npz", x_train=np.array([{}], dtype=object), y_train=np.zeros(1))
    with pytest.raises(FileFormatError, match=r"not a readable .npz of plain arrays"):
        data.mnist("train")
    (small / "usps.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(FileFormatError, match="Fetch or write it again"):
        data.usps("train")
    np.savez(small / "notmnist.npz", x=np.zeros(1))
    with pytest.raises(FileFormatError, match=r"should hold the arrays \['x', 'y'\]"):
        data.notmnist()


def test_residual_coded_pixels_come_back_exactly(small) -> None:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, size=(4, 32, 32, 3), dtype=np.uint8)
    planes = pixels.transpose(3, 0, 1, 2).copy()
    planes[0] -= planes[1]
    planes[2] -= planes[1]
    for axis in (-2, -1):
        zero = np.zeros_like(planes.take([0], axis=axis))
        planes = np.diff(planes, axis=axis, prepend=zero)
    np.savez(small / "cifar10.npz", r_test=planes, y_test=np.arange(4, dtype=np.uint8))
    x, y = data.cifar10_bytes("test")
    assert torch.equal(x, torch.from_numpy(pixels))
    assert y.tolist() == [0, 1, 2, 3]
    image, _ = data.cifar10("test")
    assert image.shape == (4, 3, 32, 32)
    torch.testing.assert_close(image[2, 1], x[2, :, :, 1] / 255)


def test_weights_lose_the_prefix_of_data_parallel(small) -> None:
    network = nn.DataParallel(nn.Linear(3, 2))
    (small / "nets").mkdir()
    weights = {key: value.numpy() for key, value in network.state_dict().items()}
    np.savez(small / "nets" / "line.npz", **weights)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(data.state_dict("line"))
    assert torch.equal(plain.weight, network.module.weight)
    again = data.state_dict(small / "nets" / "line.npz")
    assert again.keys() == {"weight", "bias"}


def test_networks_have_the_published_number_of_parameters() -> None:
    for network, expected in (
        (data.LeNet5(), 44_426),
        (data.LeNet5(num_classes=2), 43_746),
        (data.LeNet5Cifar(), 62_006),
        (data.ResNet20(), 269_722),
    ):
        assert sum(p.numel() for p in network.parameters()) == expected


def test_an_unknown_network_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no network is called 'vgg'. Known: full_mnist_lenet"):
        data.pretrained("vgg")


def test_channels_are_standardized_by_their_own_numbers() -> None:
    x = torch.rand(5, 3, 4, 4)
    for channels in (data.IMAGENET, data.CIFAR10):
        back = torch.stack(
            [channels(x)[:, c] * channels.std[c] + channels.mean[c] for c in range(3)], 1
        )
        torch.testing.assert_close(back, x)
    with pytest.raises(InputError, match=r"\(N, 3, height, width\), but have shape \(5, 4, 4, 3\)"):
        data.IMAGENET(x.permute(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("load", "shape", "classes"),
    [
        (lambda: data.mnist("test"), (10_000, 1, 28, 28), 10),
        (lambda: data.fashion_mnist("test"), (10_000, 1, 28, 28), 10),
        (lambda: data.usps("train"), (7_291, 1, 16, 16), 10),
        (lambda: data.usps("test"), (2_007, 1, 16, 16), 10),
        (data.kmnist_test, (10_000, 1, 28, 28), 10),
        (data.notmnist, (10_000, 1, 28, 28), 10),
    ],
)
def test_images_are_floats_from_zero_to_one(folder, load, shape, classes) -> None:
    x, y = load()
    assert x.shape == shape
    assert x.dtype == torch.float32
    assert x.min() == 0
    assert x.max() == 1
    assert y.shape == shape[:1]
    assert y.dtype == torch.int64
    assert y.unique().tolist() == list(range(classes))


def test_mnist_has_its_known_moments(folder) -> None:
    x, _ = data.mnist("train")
    assert len(x) == 60_000
    assert float(x.mean()) == pytest.approx(0.13066, abs=1e-5)
    assert float(x.std()) == pytest.approx(0.30811, abs=1e-5)


def test_cifar10_test_images_are_the_published_bytes(folder) -> None:
    x, y = data.cifar10_bytes("test")
    digest = hashlib.md5(x.numpy().tobytes()).hexdigest()
    assert digest == "6d2714505047e13831cd876923568712"
    assert torch.bincount(y).tolist() == [1000] * 10


def test_california_housing_starts_with_its_first_district(folder) -> None:
    x, y = data.california_housing()
    assert x.shape == (20_640, 8)
    first = torch.tensor([8.3252, 41, 6.984, 1.0238, 322, 2.5556, 37.88, -122.23])
    torch.testing.assert_close(x[0], first, rtol=1e-4, atol=1e-4)
    assert y.shape == (20_640, 1)
    assert float(y.mean()) == pytest.approx(2.068558, abs=1e-5)


@pytest.mark.parametrize("name", ["yacht", "wine-quality-red", "bostonHousing"])
def test_uci_splits_part_the_rows(folder, name) -> None:
    table = data.uci(name)
    assert table.num_splits == 20
    (x, y), (x_test, y_test) = table.split(7)
    assert len(x) + len(x_test) == len(table.x)
    assert y.shape == (len(x), 1)
    assert y_test.shape == (len(x_test), 1)
    assert round(len(table.x) / len(x_test)) == 10
    with pytest.raises(InputError, match=r"index must be in 0..19, but is 20"):
        table.split(20)


def test_an_unknown_uci_table_names_the_known_ones(folder) -> None:
    with pytest.raises(InputError, match=r"no housing.npz.*Known: bostonHousing, concrete"):
        data.uci("housing")


def save_rain(path) -> None:
    rain = np.full((3, 12, 4), np.nan, dtype=np.float32)
    rain[0, 3], rain[1, 3] = [1.0, 2.0, np.nan, 4.0], [3.0, np.nan, np.nan, 8.0]
    np.savez(
        path / "precip.npz",
        **{f"co_{name}": np.arange(4.0) + 10 * i for i, name in enumerate(("lon", "lat", "elev"))},
        co_years=np.arange(1900, 1903),
        co_ppt=rain,
        **{f"na2_{name}": np.arange(2.0) for name in ("lon", "lat")},
        na2_elev=np.array([-999.9, 12.0]),
        na2_precip=np.array([100.0, 250.0]),
    )


def test_a_month_has_the_stations_that_reported_in_millimeters(small) -> None:
    save_rain(small)
    stations = data.colorado_precipitation()
    x, rain = stations.month(1900, 4)
    assert x.tolist() == [[0, 10, 20], [1, 11, 21], [3, 13, 23]]
    assert rain[:, 0].tolist() == [10, 20, 40]
    assert stations.month(1902, 4)[1].shape == (0, 1)


def test_a_normal_is_the_mean_of_the_years_that_reported(small) -> None:
    save_rain(small)
    stations = data.colorado_precipitation()
    x, rain = stations.normal(range(1900, 1903), 4, least=2)
    assert x[:, 0].tolist() == [0, 3]
    assert rain[:, 0].tolist() == [20, 60]
    assert stations.normal(range(1900, 1903), 4, least=1)[1][:, 0].tolist() == [20, 20, 60]


def test_months_and_years_without_data_are_refused(small) -> None:
    save_rain(small)
    stations = data.colorado_precipitation()
    with pytest.raises(InputError, match=r"years must be in 1900..1902, but are range\(1903, 1904"):
        stations.month(1903, 4)
    with pytest.raises(InputError, match=r"month must be in 1..12, but is 0"):
        stations.month(1900, 0)
    with pytest.raises(InputError, match=r"years must be in 1900..1902, but are range\(1901, 1901"):
        stations.normal(range(1901, 1901), 4)


def test_an_unknown_elevation_is_nan(small) -> None:
    save_rain(small)
    x, rain = data.summer_precipitation()
    assert x[:, 2].isnan().tolist() == [True, False]
    assert rain[:, 0].tolist() == [10, 25]


def test_a_file_in_the_data_folder_comes_before_one_beside_it(monkeypatch, tmp_path) -> None:
    own, beside = tmp_path / "data", tmp_path / "reference"
    own.mkdir()
    beside.mkdir()
    monkeypatch.setenv("NET2GP_DATA", str(own))
    with pytest.raises(InputError, match=r"data/us_precip_apr1948.npz, but there is none"):
        data.us_precipitation()
    for folder, rain in ((beside, 5.0), (own, 7.0)):
        values = {"raw_mm": np.array([rain, 1.0]), "observed": np.array([1, 0], np.int8)}
        np.savez(folder / "us_precip_apr1948.npz", lonlat=np.eye(2), **values)
        x, y = data.us_precipitation()
        assert x.tolist() == [[1, 0]]
        assert y.tolist() == [[rain]]
        assert data.us_precipitation(observed=False)[0].tolist() == [[0, 1]]


def test_points_of_a_grid_are_the_cells_with_a_value() -> None:
    values = torch.tensor([[1.0, float("nan"), 2.0], [float("nan"), 3.0, 4.0]])
    grid = data.Grid(torch.tensor([10.0, 11.0, 12.0]), torch.tensor([-1.0, 1.0]), values)
    x, y = grid.points()
    assert x.tolist() == [[10, -1], [12, -1], [11, 1], [12, 1]]
    assert y[:, 0].tolist() == [1, 2, 3, 4]


def test_maps_of_rain_and_malaria_have_their_known_sizes(folder) -> None:
    median, width = data.malaria()
    assert [len(grid.points()[0]) for grid in (median, width)] == [256_579, 256_579]
    assert float(median.points()[1].max()) == pytest.approx(0.58349, abs=1e-5)
    x, rain = data.summer_precipitation()
    assert x.shape == (4893, 3)
    assert float(rain.max()) == pytest.approx(1127.958, abs=1e-3)
    stations = data.colorado_precipitation()
    assert len(stations.month(1986, 12)[0]) == 290
    assert float(stations.rain.nanmean()) == pytest.approx(35.5, abs=0.1)
    shared_reference()
    assert data.us_precipitation()[0].shape == (5906, 2)
    assert data.us_precipitation(observed=False)[1].shape == (6012, 1)


def correct(name: str, x: torch.Tensor, y: torch.Tensor) -> tuple[int, float]:
    """How many labels the network gets right, and its mean cross entropy."""
    network = data.pretrained(name)
    with torch.no_grad():
        logits = torch.cat([network(part) for part in x.split(250)])
    return int((logits.argmax(-1) == y).sum()), float(cross_entropy(logits, y))


@pytest.mark.parametrize(
    ("name", "right", "nll"),
    [("full_mnist_lenet_adaml2", 9914, 0.031815), ("full_mnist_lenet_vogn", 9754, 0.085846)],
)
def test_the_mnist_lenets_score_what_was_published(folder, name, right, nll) -> None:
    value = correct(name, *data.mnist("test"))
    assert value[0] == right
    assert value[1] == pytest.approx(nll, abs=2e-6)


def test_the_two_class_lenet_tells_zeros_from_ones(folder) -> None:
    network = data.LeNet5(num_classes=2).double().eval()
    stored = shared_reference() / "dnn2gp_model_2_class_mnist_zone_lenet_vogn.npz"
    network.load_state_dict(data.state_dict(stored))
    x, y = data.mnist("test")
    x, y = x[y < 2], y[y < 2]
    with torch.no_grad():
        share = (network(x.double()).argmax(-1) == y).double().mean()
    assert float(share) == pytest.approx(0.9990543735224586, abs=1e-12)


@pytest.mark.parametrize(("name", "right"), [("cifar_lenet_adam", 336), ("cifar_lenet_vogn", 324)])
def test_the_cifar_lenets_score_as_measured_on_500_images(folder, name, right) -> None:
    x, y = data.cifar10("test")
    assert correct(name, data.CIFAR10(x[:500]), y[:500])[0] == right


def test_resnet20_scores_as_measured_on_500_images(folder) -> None:
    x, y = data.cifar10("test")
    assert correct("resnet20_cifar10", data.IMAGENET(x[:500]), y[:500])[0] == 455


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "channels", "right"),
    [
        ("resnet20_cifar10", data.IMAGENET, 9173),
        ("cifar_lenet_adam", data.CIFAR10, 6809),
        ("cifar_lenet_vogn", data.CIFAR10, 6720),
    ],
)
def test_the_cifar_networks_score_what_was_published(folder, name, channels, right) -> None:
    x, y = data.cifar10("test")
    value, nll = correct(name, channels(x), y)
    assert value == right
    if name == "resnet20_cifar10":
        assert nll == pytest.approx(0.3727, abs=5e-5)


def blobs(center: tuple[float, float], spread: tuple[float, float], size: int = 40) -> torch.Tensor:
    """A bright blob at a place of [−1, 1]², (1, 1, size, size)."""
    places = (2 * torch.arange(size, dtype=torch.float64) + 1) / size - 1
    parts = [(-0.5 * ((places - c) / s) ** 2).exp() for c, s in zip(center, spread, strict=True)]
    return torch.outer(parts[1], parts[0])[None, None]


def test_aligned_images_are_where_the_reference_is() -> None:
    reference = blobs((0.1, -0.2), (0.2, 0.15))
    for images in (blobs((-0.1, 0.2), (0.3, 0.25)), blobs((0.0, 0.0), (0.1, 0.2), 80)):
        align = data.align_images(images, reference)
        torch.testing.assert_close(align(images), reference, rtol=0, atol=0.02)
        assert align(images.float()).dtype == torch.float32


def test_images_that_are_in_place_stay() -> None:
    reference = blobs((0.1, -0.2), (0.2, 0.15))
    torch.testing.assert_close(data.align_images(reference, reference)(reference), reference)
    brighter = data.align_images(3 * reference, reference)
    torch.testing.assert_close(brighter(3 * reference), 3 * reference)


@pytest.mark.parametrize("down", [1, 2, 4])
@pytest.mark.parametrize("right", [1, 3])
def test_a_pixel_that_spans_several_is_their_average(down, right) -> None:
    # one place of each would keep some pixels of a fine pattern, and drop the others
    images = torch.rand(2, 3, 6 * down, 5 * right, dtype=torch.float64)
    align = data.alignment.Alignment(torch.eye(2, 3, dtype=torch.float64), (6, 5))
    torch.testing.assert_close(align(images), nn.functional.avg_pool2d(images, (down, right)))


def test_images_that_cannot_be_aligned_are_refused() -> None:
    reference = blobs((0.0, 0.0), (0.2, 0.2))
    with pytest.raises(InputError, match=r"images must be zero or positive and somewhere bright"):
        data.align_images(torch.zeros(2, 1, 4, 4), reference)
    with pytest.raises(InputError, match=r"reference must be zero or positive"):
        data.align_images(reference, reference - 0.5)
    with pytest.raises(InputError, match=r"images must be images \(N, channels, height, width\)"):
        data.align_images(reference[0, 0], reference)
    with pytest.raises(InputError, match=r"x must be images"):
        data.align_images(reference, reference)(reference.long())
    with pytest.raises(InputError, match=r"finite"):
        data.align_images(reference * float("nan"), reference)
