"""Datasets with groups as they are released; a missing or odd file is named."""

import pickle
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import ExplicitVRLittleEndian, JPEGBaseline8Bit, SecondaryCaptureImageStorage

from seecause.data import open_data
from seecause.data.photos import Photo
from seecause.data.shortcuts import part_of_test, read_votes, read_xray, rle_mask
from seecause.errors import BadImage, DataMissing, MissingExtra, UnknownName
from tests.files import grey, lines, photo

# cub and waterbirds

FOLDER = "waterbird_complete95_forest2water2"
NAMES = [
    f"{kind}/{kind[4:]}_{n}.jpg" for kind in ("001.Albatross", "002.Sparrow") for n in range(12)
]  # 11 of each train, the last one test
VOTES = np.array([[0, 0, 51, 255, 0, 0]] * 4)
LISTS = (
    "images", "image_class_labels", "train_test_split", "bounding_boxes", "parts/part_locs",
    "classes",
)  # fmt: skip


@pytest.fixture
def cub(tmp_path) -> Path:
    """24 birds of two classes, in the release's own lists; ids do not start at 1 and lists are not
    in the same order."""
    root = tmp_path / "CUB_200_2011"
    ids = [str(5 + n) for n in range(len(NAMES))]
    labels = [f"{i} {1 + n // 12}" for n, i in reversed(list(enumerate(ids)))]
    points = [f"{i} {part} {part}.0 2.5 {part % 2}" for i in ids for part in range(1, 16)]
    lines(root / "classes.txt", "1 001.Albatross", "2 002.Sparrow")
    lines(root / "images.txt", *(f"{i} {name}" for i, name in zip(ids, NAMES, strict=True)))
    lines(root / "image_class_labels.txt", *labels)
    lines(root / "train_test_split.txt", *(f"{i} {int(n % 12 < 11)}" for n, i in enumerate(ids)))
    lines(root / "bounding_boxes.txt", *(f"{i} 1.0 {n}.5 3.0 2.0" for n, i in enumerate(ids)))
    lines(root / "parts" / "part_locs.txt", *points)
    for n, name in enumerate(NAMES):
        photo(root / "images" / name, seed=n)
        photo(root / FOLDER / name, seed=100 + n)
    for name in (NAMES[11], NAMES[23]):
        grey((root / "segmentations" / name).with_suffix(".png"), VOTES)
    rows = [
        f"{i},{name},{n // 12},{(0, 1, 2)[n % 3]},{n % 2},/forest/x.jpg"
        for n, (i, name) in enumerate(zip(ids, NAMES, strict=True))
    ]
    lines(root / FOLDER / "metadata.csv", "img_id,img_filename,y,split,place,place_filename", *rows)
    return root


def pixels_of(sample) -> torch.Tensor:
    return (sample.image * 255).round().byte().permute(1, 2, 0)


def test_cub_joins_its_lists_on_the_id(cub):
    data = open_data(f"cub:{cub}")
    assert data.classes == ("001.Albatross", "002.Sparrow")
    assert [(s.id, s.label) for s in data] == [(NAMES[11], 0), (NAMES[23], 1)]
    bird = data[1]
    assert bird.box == (1.0, 23.5, 3.0, 2.0) and bird.group is None
    assert bird.points.shape == (15, 3) and bird.points[2].tolist() == [3.0, 2.5, 1.0]
    assert torch.equal(bird.mask, torch.from_numpy(VOTES > 0))
    known = torch.from_numpy(photo(cub / "images" / NAMES[23], seed=23))
    assert torch.equal(pixels_of(bird), known)
    before, boxes = data.fingerprint, cub / "bounding_boxes.txt"
    boxes.write_text(boxes.read_text().replace("23.5", "22.5"))
    assert open_data(f"cub:{cub}").fingerprint != before


def test_cub_keeps_every_tenth_training_photo_of_a_class_for_validation(cub):
    train, val, both = (set(open_data(f"cub:{cub}:{s}").ids) for s in ("train", "val", "trainval"))
    assert val == {NAMES[9], NAMES[21]} and train == both - val and len(both) == 22
    assert not both & set(open_data(f"cub:{cub}").ids)


@pytest.mark.parametrize("mode", ["L", "RGB", "LA", "RGBA", "P"])
def test_segmentations_are_votes_whatever_their_mode(tmp_path, mode):
    grey(tmp_path / "a.png", VOTES, mode)
    mask = read_votes(Photo(tmp_path / "a.jpg", "a", mask=tmp_path / "a.png"))
    assert torch.equal(mask, torch.from_numpy(VOTES > 0))


def test_segmentations_may_lie_beside_cub_or_be_missing(cub):
    (cub / "segmentations").rename(cub / "elsewhere")
    assert open_data(f"cub:{cub}")[0].mask is None
    (cub / "elsewhere").rename(cub.parent / "segmentations")
    assert open_data(f"cub:{cub}")[0].mask is not None
    path = (cub.parent / "segmentations" / NAMES[23]).with_suffix(".png")
    grey(path, VOTES[:, :5])
    with pytest.raises(BadImage, match=path.name):
        open_data(f"cub:{cub}")[1]


@pytest.mark.parametrize("name", LISTS)
def test_a_missing_or_damaged_list_of_cub_is_named(cub, name):
    path = cub / f"{name}.txt"
    path.write_text(path.read_text() + "line\n")
    with pytest.raises(DataMissing, match=r"txt: the line 'line' cannot be read"):
        open_data(f"cub:{cub}")
    path.unlink()
    with pytest.raises(DataMissing, match="no such file"):
        open_data(f"cub:{cub}")


def test_a_photo_that_a_list_forgets_is_named(cub):
    lines(cub / "bounding_boxes.txt", "5 1 1 1 1")
    with pytest.raises(DataMissing, match="the lines of photo 6: cannot be read"):
        open_data(f"cub:{cub}")


def test_waterbirds_have_groups_and_cubs_masks(cub):
    data = open_data(f"waterbirds:{cub / FOLDER}")
    assert data.classes == ("land bird", "water bird") and data.places == ("land", "water")
    by_name = {NAMES[n]: (n // 12, n % 2) for n in range(24) if n % 3 == 2}
    assert dict(zip(data.ids, data.groups, strict=True)) == by_name
    assert data.labels == tuple(y for y, _ in by_name.values())
    assert data[-1].id == NAMES[23] and torch.equal(data[-1].mask, torch.from_numpy(VOTES > 0))
    known = torch.from_numpy(photo(cub / FOLDER / NAMES[23], seed=123))
    assert torch.equal(pixels_of(data[-1]), known)
    assert open_data(f"waterbirds:{cub}:train").groups[0] == (0, 0)
    assert len(open_data(f"waterbirds:{cub}:val")) == 8


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["img_filename,y,split,place", "a.jpg,0,0,0"], "no image is listed"),
        (["img_filename,y,split", "a.jpg,0,0"], "no column place"),
        (["img_filename,y,split,place", "a.jpg,0"], "the line 'a.jpg 0' cannot be read"),
        (["img_filename,y,split,place", "a.jpg,7,2,0"], "cannot be read"),
        (["img_filename,y,split,place", f"{'a' * 140_000},0,0,0"], "cannot be read"),
    ],
)
def test_odd_waterbird_lists_are_named(cub, rows, said):
    lines(cub / FOLDER / "metadata.csv", *rows)
    with pytest.raises(DataMissing, match=said):
        open_data(f"waterbirds:{cub}")
    with pytest.raises(UnknownName, match=r"trian.*train"):
        open_data(f"waterbirds:{cub}:trian")


def test_waterbird200_is_cubs_test_on_other_backgrounds(cub):
    data, plain = open_data(f"waterbird200:{cub}"), open_data(f"cub:{cub}")
    assert data.ids == plain.ids and data.labels == plain.labels and data.classes == plain.classes
    assert data[0].box == plain[0].box and torch.equal(data[0].mask, plain[0].mask)
    assert not torch.equal(data[0].image, plain[0].image)
    (cub / FOLDER).rename(cub.parent / "away")
    with pytest.raises(DataMissing, match=FOLDER):
        open_data(f"waterbird200:{cub}")


# metashift


@pytest.fixture
def metashift(tmp_path) -> Path:
    for group, count in (("cat(sofa)", 2), ("cat(bed)", 1), ("dog(bench)", 2), ("dog(bike)", 1)):
        for n in range(count):
            photo(tmp_path / "train" / group[:3] / group / f"{n}.jpg", size=(2, 2))
    for animal in ("cat", "dog"):
        for n in range(10):
            photo(tmp_path / "test" / animal / f"{animal}(shelf)" / f"{n:02}.jpg", size=(2, 2))
    return tmp_path


def test_metashift_places_are_in_brackets(metashift):
    train = open_data(f"metashift:{metashift}:train")
    assert train.places == ("bed", "bench", "bike", "shelf", "sofa")
    assert train.classes == ("cat", "dog") and train[1].id == "cat(sofa)/0.jpg"
    assert train.groups == ((0, 0), (0, 4), (0, 4), (1, 1), (1, 1), (1, 2))
    whole = open_data(f"metashift:{metashift}:test-all")
    assert len(whole) == 20 and set(whole.groups) == {(0, 3), (1, 3)}


def test_disc_holds_out_fifteen_percent_of_the_test_folder(metashift):
    """Sizes and class counts of the public split: 81 photos for validation, 201 cats and 259 dogs
    for test."""
    whole = [(Path(str(n)), "cat" if n < 235 else "dog") for n in range(541)]
    val, test = part_of_test(whole, "val"), part_of_test(whole, "test")
    assert len(val) == 81 and len(test) == 460 and not set(val) & set(test)
    assert [animal for _, animal in test].count("cat") == 201
    sizes = [len(open_data(f"metashift:{metashift}:{split}")) for split in ("val", "test")]
    assert sizes == [3, 17]


def test_an_odd_metashift_is_named(metashift):
    (metashift / "test" / "cat" / "shelf").mkdir()
    with pytest.raises(DataMissing, match=r"shelf: its name is not like cat\(place\)"):
        open_data(f"metashift:{metashift}")
    for path in (metashift / "train" / "cat" / "cat(bed)").iterdir():
        path.unlink()
    with pytest.raises(BadImage, match=r"cat\(bed\)"):
        open_data(f"metashift:{metashift}")
    with pytest.raises(DataMissing, match="train/cat: no such folder"):
        open_data(f"metashift:{metashift / 'test'}")


# celeba

FACES = {  # blond, male, split
    "000001.jpg": (1, 1, 0),
    "000002.jpg": (1, 0, 0),
    "000003.jpg": (0, 1, 1),
    "000004.jpg": (0, 0, 2),
}


@pytest.fixture(params=["csv", "txt", "kaggle"])
def celeba(tmp_path, request) -> Path:
    gap, suffix = ("  ", "txt") if request.param == "txt" else (",", "csv")
    heads = {"txt": (["4", "Bald Blond_Hair Male"], [])}
    first, second = heads.get(suffix, (["image_id,Bald,Blond_Hair,Male"], ["image_id,partition"]))
    signs = {name: gap.join(("-1", "1")[code] for code in row[:2]) for name, row in FACES.items()}
    attributes = [f"{name}{gap}1{gap}{both}" for name, both in signs.items()]
    splits = [f"{name}{gap}{split}" for name, (_, _, split) in FACES.items()]
    lines(tmp_path / f"list_attr_celeba.{suffix}", *first, *attributes)
    lines(tmp_path / f"list_eval_partition.{suffix}", *second, *splits)
    folder = tmp_path / "img_align_celeba"
    for name in FACES:
        photo((folder / folder.name if request.param == "kaggle" else folder) / name)
    return tmp_path


def test_celeba_reads_both_forms_of_its_lists(celeba):
    data = open_data(f"celeba:{celeba}:train")
    assert data.groups == ((1, 1), (1, 0)) and data.labels == (1, 1)
    assert data.places == ("not male", "male")
    assert data[0].id == "000001.jpg" and data[0].image.shape == (3, 4, 6)
    assert open_data(f"celeba:{celeba}").groups == ((0, 0),)
    assert open_data(f"celeba:{celeba}:val").groups == ((0, 1),)


def test_celeba_lists_that_do_not_match_are_named(celeba):
    (partition,) = celeba.glob("list_eval*")
    (attributes,) = celeba.glob("list_attr*")
    content = partition.read_text()
    for old, new, said in (
        ("000004.jpg", "000009.jpg", "000009"),
        ("2\n", "x\n", "'x'"),
        ("2\n", "0\n", "no image is listed"),
    ):
        partition.write_text(content.replace(old, new))
        with pytest.raises(DataMissing, match=said):
            open_data(f"celeba:{celeba}")
    attributes.write_text(attributes.read_text().replace("Blond_Hair", "Brown_Hair"))
    with pytest.raises(DataMissing, match="Blond_Hair"):
        open_data(f"celeba:{celeba}:train")


# domainnet


@pytest.fixture
def domainnet(tmp_path) -> Path:
    for name in ("real/aircraft_carrier/r1", "real/zebra/r2", "sketch/zebra/s1"):
        photo(tmp_path / f"{name}.jpg")
    lines(tmp_path / "real_test.txt", "real/aircraft_carrier/r1.jpg 0", "real/zebra/r2.jpg 2")
    lines(tmp_path / "sketch_test.txt", "sketch/zebra/s1.jpg 2")
    lines(tmp_path / "real_train.txt", "real/zebra/r2.jpg 2")
    return tmp_path


def test_domains_are_the_second_code_of_groups(domainnet):
    data = open_data(f"domainnet:{domainnet}")
    assert data.classes == ("aircraft carrier", "class 1", "zebra") and data.labels == (0, 2, 2)
    assert [(data.places[place]) for _, place in data.groups] == ["real", "real", "sketch"]
    assert open_data(f"domainnet:{domainnet}:sketch").ids == ("sketch/zebra/s1.jpg",)
    train = open_data(f"domainnet:{domainnet}:real:train")
    assert train.ids == ("real/zebra/r2.jpg",) and train[0].image.shape == (3, 4, 6)
    assert len(open_data(train.name)) == 1 and data.name == f"domainnet:{domainnet}:test"


def test_odd_domainnet_is_named(domainnet):
    with pytest.raises(DataMissing, match="quickdraw_test"):
        open_data(f"domainnet:{domainnet}:quickdraw")
    with pytest.raises(UnknownName, match="cartoon"):
        open_data(f"domainnet:{domainnet}:cartoon")
    for wrong, said in (
        ("sketch/horse/s1.jpg 2", "two names of class 2"),
        ("x", "'x' cannot be read"),
    ):
        lines(domainnet / "sketch_test.txt", wrong)
        with pytest.raises(DataMissing, match=said):
            open_data(f"domainnet:{domainnet}")
    with pytest.raises(DataMissing, match="real_test"):
        open_data(f"domainnet:{domainnet / 'real'}")


# siim-acr

HEIGHT, WIDTH = 4, 3
# down the columns: pixels 1, 2 and 6 -> rows 1, 2 of the first column and row 2 of the second
RUNS = "1 2 3 1"
MASK = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
TUBES = {"tube-sick": True, "tube-well": True, "bare-sick": False, "bare-well": False}
PIXELS = np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH)


def xray(path: Path, pixels: np.ndarray = PIXELS, kind: str = "MONOCHROME2") -> None:
    """An uncompressed DICOM file; 8 bits, or as many as the pixels have."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    file.Rows, file.Columns = pixels.shape
    file.SamplesPerPixel, file.PixelRepresentation, file.PhotometricInterpretation = 1, 0, kind
    file.BitsAllocated = file.BitsStored = 8 * pixels.itemsize
    file.HighBit = file.BitsStored - 1
    file.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path)


@pytest.fixture
def siim(tmp_path) -> Path:
    names = [*TUBES, *(f"train{n}-{'sick' if n % 2 else 'well'}" for n in range(20))]
    for n, name in enumerate([*names, "unlabelled"]):
        xray(tmp_path / "dicom-images-train" / f"a{n}" / f"b{n}" / f"{name}.dcm")
    rows = [f"{name}, {RUNS if name.endswith('sick') else '-1'}" for name in names]
    lines(tmp_path / "train-rle.csv", "ImageId, EncodedPixels", *rows, "tube-sick, 0 1")
    (tmp_path / "cxr_tube_dict.pkl").write_bytes(pickle.dumps(TUBES))
    return tmp_path


def test_run_lengths_are_relative_and_down_the_columns():
    assert rle_mask(RUNS, (HEIGHT, WIDTH)).int().tolist() == MASK
    assert not rle_mask(" -1", (HEIGHT, WIDTH)).any() and rle_mask("0 12", (HEIGHT, WIDTH)).all()
    for odd in ("1 2 3", "1 x", "-1 2", "10 3"):
        with pytest.raises(ValueError):
            rle_mask(odd, (HEIGHT, WIDTH))


def test_photos_whose_tube_is_told_are_the_test_set_and_the_rest_is_trained_on(siim):
    data = open_data(f"siim:{siim}")
    groups = {"tube-sick": (1, 1), "tube-well": (0, 1), "bare-sick": (1, 0), "bare-well": (0, 0)}
    assert dict(zip(data.ids, data.groups, strict=True)) == groups
    assert set(open_data(f"siim:{siim}:robust").ids) == {"tube-well", "bare-sick"}
    assert set(open_data(f"siim:{siim}:non-robust").ids) == {"tube-sick", "bare-well"}
    assert data.classes == ("no pneumothorax", "pneumothorax")
    assert data.places == ("no tube", "tube")
    train, val, both = (
        set(open_data(f"siim:{siim}:{s}").ids) for s in ("train", "val", "trainval")
    )
    assert len(both) == 20 and val == {"train18-well", "train19-sick"} and train == both - val
    assert set(open_data(f"siim:{siim}:train").groups) == {None}


def test_pixels_and_masks_of_xrays(siim):
    by_id = {s.id: s for s in open_data(f"siim:{siim}")}
    expected = torch.from_numpy(PIXELS).expand(3, -1, -1)
    assert torch.equal((by_id["bare-sick"].image * 255).round().byte(), expected)
    assert by_id["bare-sick"].mask.int().tolist() == MASK and not by_id["bare-well"].mask.any()
    assert int(by_id["tube-sick"].mask.sum()) == 4  # two rows: their union
    before = open_data(f"siim:{siim}").fingerprint
    (siim / "train-rle.csv").write_text((siim / "train-rle.csv").read_text() + "bare-well, -1\n")
    assert open_data(f"siim:{siim}").fingerprint != before
    path = siim / "a.dcm"
    xray(path, kind="MONOCHROME1")  # black is the largest number
    assert np.array_equal(np.asarray(read_xray(Photo(path, "a")))[..., 0], 255 - PIXELS)
    jpeg = BytesIO()
    Image.fromarray(np.full((HEIGHT, WIDTH), 77, np.uint8)).save(jpeg, format="JPEG")
    xray(path)
    file = pydicom.dcmread(path)
    file.file_meta.TransferSyntaxUID = JPEGBaseline8Bit  # as in the release
    file.PixelData = encapsulate([jpeg.getvalue()])
    file.save_as(path)
    assert np.abs(np.asarray(read_xray(Photo(path, "a"))).astype(int) - 77).max() <= 2


@pytest.mark.parametrize("kind", ["text", "truncated", "missing", "deep"])
def test_a_corrupt_dicom_is_an_error_with_a_name(siim, kind):
    path = next(siim.glob("dicom-images-train/*/*/bare-well.dcm"))
    data = open_data(f"siim:{siim}")
    if kind == "text":
        path.write_text("I am not an X-ray")
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif kind == "missing":
        path.unlink()
    else:
        xray(path, np.zeros((HEIGHT, WIDTH), np.uint16))
    index = data.ids.index("bare-well")
    with pytest.raises(BadImage, match=r"bare-well\.dcm"):
        data[index]
    assert data[index - 1].id != "bare-well"


def test_odd_siim_lists_are_named(siim, caplog, monkeypatch):
    tubes, known = siim / "cxr_tube_dict.pkl", pickle.dumps(TUBES)
    for content, said in (
        (pickle.dumps(["x"]), "cannot be read"),
        (pickle.dumps({"other": True}), "no image is listed"),
        (pickle.dumps(Path("/")), "would load"),
        (known[:-9], "cannot be read"),
    ):
        tubes.write_bytes(content)
        with pytest.raises(DataMissing, match=said):
            open_data(f"siim:{siim}")
    tubes.write_bytes(known)
    rows = ("ImageId, EncodedPixels", "bare-sick, 1 2 3", "gone, -1", "tube-well, -1")
    lines(siim / "train-rle.csv", *rows)
    data = open_data(f"siim:{siim}")
    assert "1 labelled images have no DICOM file" in caplog.text and len(data) == 2
    with pytest.raises(DataMissing, match="bare-sick"):
        data[0]
    with pytest.raises(DataMissing, match="no image is listed"):
        open_data(f"siim:{siim}:train")
    with pytest.raises(DataMissing, match=r"train-rle\.csv: no such file"):
        open_data(f"siim:{siim / 'dicom-images-train'}")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(MissingExtra, match=r"seecause\[medical\]"):
        data[1]
