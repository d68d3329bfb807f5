"""What a user runs against the arithmetic in it: seconds of whole commands over many images.

    python benchmarks/commands.py PHOTOS --weights my.safetensors       # every section, on a GPU
    python benchmarks/commands.py PHOTOS --weights FILE --sections explain --images 60 --workers 0,2
    python benchmarks/commands.py PHOTOS --sections calls,lvlm --sizes ViT-Ti/16 --shape toy

PHOTOS has a folder of images for each class, named by its WordNet id (`imagenet/val`). Sections:

    explain   `seecause explain` in a process of its own, against its maps of images in memory and a
              plain DataLoader loop
    bench     `bench run` with four methods, `audit` (with elliptic object masks), `heads score`,
    audit     `repair` and `discover` against the plain forwards in them: floating-point operations,
    heads     counted with CUDA graphs off (of `audit`, whose verdict decides how many there are,
    repair    on all images, else on a few), over those of one forward, at the best batch size and
    discover  same dtype
    many      `explain` of copies of the photos: memory, disk and page
    page      the writer alone, of as many cards, and the time to open them (needs chromium)
    calls     `sc.attribute` of one image against the captured sweep, and mosaic against itself
    lvlm      64 derivatives of a language model of random weights, in two processes, one after the
              other, that share a cache of kernels which is empty at the beginning

Start-up is a command on few images, less its arithmetic; bytecode of libraries is cached, as pip
leaves it. With --profile each command runs once more
under cProfile, and the functions that take longest are listed.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import cyclopts
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import heading, race, row, title, usual_dtype
from seecause.attribution.attribute import (
    attribute,
    attribute_batch,
    batch_size,
    default_methods,
    explain_batches,
    image_batches,
)
from seecause.cli.shared import Printing, Reading
from seecause.data.dataset import find_images
from seecause.models.base import ImageModel

DATASET = ("bench", "audit", "heads", "repair", "discover")
SECTIONS = f"explain,{','.join(DATASET)},lvlm,calls,page,many"
VIT_TINY = "timm:vit_tiny_patch16_224"
METHODS = "caap,mosaic,gae,rollout"
BATCHES = (64, 256, 512, 1024)
FEW = 16  # images of a command that is start-up, but for their arithmetic
REPEATED = 5  # images after the first, of which the median is the second
CHROMIUM = Path("/usr/bin/chromium")
SIZES = {
    "ViT-Ti/16": "vit_tiny_patch16_224",
    "ViT-B/16": "vit_base_patch16_224",
    "ViT-L/16": "vit_large_patch16_224",
}
Words = Sequence[str]


@dataclass
class Cost:
    """Seconds of the clock and of processors."""

    clock: float = 0.0
    processor: float = 0.0

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.clock - other.clock, self.processor - other.processor)

    def over(self, other: Cost) -> str:
        clock, processor = self.clock / other.clock, self.processor / other.processor
        return f"{clock:.2f}, {processor:.2f}"

    def __str__(self) -> str:
        return f"{self.clock:.2f}, {self.processor:.2f}"


def _processor() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def timed() -> Iterator[Cost]:
    """The cost of what the block does and of the processes that it waits for."""
    cost, clock, processor = Cost(), time.perf_counter(), _processor()
    yield cost
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    cost.clock, cost.processor = time.perf_counter() - clock, _processor() - processor


def own(*words: str) -> list[str]:
    """This package's command in a process of its own."""
    return [sys.executable, "-m", "seecause", *words]


def run(words: Words, **more: Any) -> Cost:
    """A command from start to end; one that fails is not measured."""
    with timed() as cost:
        subprocess.run(words, check=True, **more)
    return cost


@dataclass(frozen=True)
class Setting:
    """What all sections measure on: photos, a model, and where files may be written."""

    photos: Path
    model_words: list[str]
    name: str
    reading: Reading
    images: int
    copies: int
    workers: list[int]
    sizes: list[str]
    shape: str
    patience: float
    profile: bool
    place: Path

    @cached_property
    def files(self) -> list[str]:
        return find_images([self.photos])[: self.images]

    @cached_property
    def model(self) -> ImageModel:
        return self.reading.load(self.name, Printing(quiet=True))

    @cached_property
    def masked(self) -> Path:
        """The photos in their class folders, with an ellipse as object mask of each."""
        root = self.place / "masked"
        for file in map(Path, self.files):
            photo = root / file.parent.name / file.name
            mask = root / "masks" / file.parent.name / f"{file.stem}.png"
            for path in (photo, mask):
                path.parent.mkdir(parents=True, exist_ok=True)
            photo.symlink_to(file.absolute())
            with Image.open(file) as image:
                drawn = Image.new("L", image.size)
            wide, high = drawn.size
            ImageDraw.Draw(drawn).ellipse((wide // 5, high // 5, wide * 4 // 5, high * 4 // 5), 255)
            drawn.save(mask)
        return root

    def out(self, name: str) -> list[str]:
        return ["--out", str(self.place / name), "--quiet"]

    def linked(self, name: str, count: int) -> Path:
        """A folder with links to the photos, over and over."""
        root = self.place / name
        root.mkdir()
        for number in range(count):
            file = Path(self.files[number % len(self.files)])
            (root / f"{number:06d}{file.suffix}").symlink_to(file.absolute())
        return root

    @cached_property
    def forward(self) -> tuple[float, int]:
        """Seconds of a plain forward of one image in float32, and the batch that suits it best."""
        best = (float("inf"), 0)
        for size in BATCHES if self.model.device.type == "cuda" else (1, 16):
            images = torch.randn(size, 3, *self.model.preprocess.size, device=self.model.device)
            with torch.no_grad():
                timing = race({"": partial(self.model, images)}, self.model.device, repeats=5)[""]
            best = min(best, (timing.seconds / size, size))
        return best


# ---------------------------------------------------------------- explain


def explained(setting: Setting) -> None:
    """`seecause explain` against the maps in it, and against a plain loop."""
    model = setting.model
    heading(
        *("workers", "explain", "start-up", "maps", "plain loop", "photos/s after start-up"),
        *("command / maps", "without start-up / maps"),
    )
    folders = {count: setting.linked(f"some-{count}", count) for count in (1, len(setting.files))}
    every, alone = maps(model, setting.files), maps(model, setting.files[:1])
    for workers in setting.workers:
        loop = plain_loop(model, setting.files, workers)

        def command(count: int, workers: int = workers) -> Cost:
            out = setting.out(f"explained-{workers}-{count}")
            words = [*setting.model_words, "--workers", str(workers), *out]
            return run(own("explain", str(folders[count]), *words))

        start = command(1) - alone
        whole = command(len(setting.files))
        rest = whole - start
        speed = f"{len(setting.files) / rest.clock:.0f}"
        row(workers, whole, start, every, loop, speed, whole.over(every), rest.over(every))
    folder = setting.place / f"explained-{setting.workers[-1]}-{len(setting.files)}"
    print(f"\n{page_size(folder, len(setting.files))}")
    words = ["explain", str(folders[len(setting.files)]), *setting.model_words]
    profiled(setting, [*words, *setting.out("explain-again")])


def maps(model: ImageModel, files: list[str]) -> Cost:
    """Maps of all images by the usual methods, after one batch that warms up."""
    methods = default_methods(model)
    read = image_batches(model, files, batch=batch_size(model), skipped=[])
    batches = [part.images.to(model.device, model.dtype) for part in read]

    def explain(images: Tensor) -> None:
        for method in methods:
            attribute_batch(model, images, None, method, {})

    for size in {len(images): images for images in batches}.values():
        explain(size)
    with timed() as cost:
        for images in batches:
            explain(images)
    return cost


class Files(torch.utils.data.Dataset):
    """Images as anybody would read them."""

    def __init__(self, files: list[str], prepare: Callable[[str], Tensor]):
        self.files, self.prepare = files, prepare

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> Tensor:
        return self.prepare(self.files[place])


def plain_loop(model: ImageModel, files: list[str], workers: int) -> Cost:
    """One forward of each image, decoded by the workers of a DataLoader."""
    data = Files(files, model.preprocess.transform)
    loader = DataLoader(data, batch_size=batch_size(model), num_workers=workers)
    with timed() as cost, torch.no_grad():
        for images in loader:
            model(images.to(model.device, model.dtype)).argmax(dim=1).cpu()
    return cost


def page_size(folder: Path, count: int) -> str:
    """Bytes of what `explain` wrote."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    photos = [path.stat().st_size for path in (folder / "images").glob("*.jpg")]
    first = [folder / "index.html", folder / "data" / "index.js"]
    page = sum(path.stat().st_size for path in first if path.is_file())
    return (
        f"on disk {total / count / 1024:.1f} KB a photo ({len(files):,} files); index.html and"
        f" its list {page / 2**20:.2f} MB, an image {sum(photos) / len(photos) / 1024:.1f} KB"
    )


# ---------------------------------------------------------------- commands over a dataset


def dataset_words(setting: Setting, kind: str) -> list[str]:
    """A command without the number of images and the folder it writes."""
    words = {
        "bench": ["bench", "run", "--method", METHODS, "--metric", "insertion,deletion,ins-del"],
        "audit": ["audit"],
        "heads": ["heads", "score", "--masks-from", "given"],
        "repair": ["repair", "--remedies", "last-layer", "--force"],
        "discover": ["discover"],
    }[kind]
    photos = setting.photos if kind == "bench" else setting.masked
    return [*words, *setting.model_words, "--data", f"folder:{photos}"]


def dataset_command(setting: Setting, kind: str) -> None:
    """A command over all photos against the plain forwards in it."""
    words, count = dataset_words(setting, kind), len(setting.files)
    few = min(FEW, count)

    def forwards_of(images: int) -> float:
        out = setting.out(f"{kind}-counted-{images}")
        counted = subprocess.run(
            [sys.executable, __file__, "--count", "--", *words, "--limit", str(images), *out],
            check=True, capture_output=True, text=True,
            env={**os.environ, "SEECAUSE_GRAPHS": "0"},
        )  # fmt: skip
        return float(counted.stdout.splitlines()[-1])

    inside = forwards_of(few)
    forwards = forwards_of(count) / count if kind == "audit" else inside / few
    each, batch = setting.forward
    loop = plain_loop(setting.model, setting.files, setting.workers[-1]).clock
    first = run(own(*words, "--limit", str(few), *setting.out(f"{kind}-few")))
    whole = run(own(*words, "--limit", str(count), *setting.out(f"{kind}-all")))
    start = first.clock - inside * each
    arithmetic = forwards * count * each
    ratio, alone = whole.clock / arithmetic, (whole.clock - start) / arithmetic
    heading(
        *("command", "photos", "seconds", "start-up", "forwards a photo", "seconds of forwards"),
        *("batch", "plain loop", "command / forwards", "without start-up / forwards"),
        "without start-up / forwards and plain loop",
    )
    both = (whole.clock - start) / (arithmetic + loop)
    cells = [f"{whole.clock:.2f}", f"{start:.2f}", f"{forwards:.1f}", f"{arithmetic:.2f}"]
    row(kind, count, *cells, batch, f"{loop:.2f}", f"{ratio:.2f}", f"{alone:.2f}", f"{both:.2f}")
    profiled(setting, [*words, "--limit", str(count), *setting.out(f"{kind}-again")])


def count_forwards(words: Words) -> None:
    """Run a command here and print its floating-point operations over those of one forward."""
    from torch.utils.flop_counter import FlopCounterMode

    from seecause.cli import run as run_here
    from seecause.loading import load

    model: list[ImageModel] = []

    def loaded(*given: Any, **more: Any) -> ImageModel:
        model.append(load(*given, **more))
        return model[-1]

    import seecause.bench.cells as cells
    import seecause.loading as loading

    loading.load, cells.load = loaded, loaded
    with FlopCounterMode(display=False) as whole:
        code = run_here(words)
    if code:
        sys.exit(f"{' '.join(words)}: {code}")
    view = model[0]
    images = torch.randn(1, 3, *view.preprocess.size, device=view.device, dtype=view.dtype)
    with FlopCounterMode(display=False) as one, torch.no_grad():
        view.native(images)
    print(whole.get_total_flops() / one.get_total_flops())


def profiled(setting: Setting, words: Words) -> None:
    """The functions of a command that take longest, by their own time."""
    if not setting.profile:
        return
    code = (
        "import cProfile, pstats, sys\n"
        "from seecause.cli import run\n"
        "profile = cProfile.Profile()\n"
        "profile.runcall(run, sys.argv[1:])\n"
        "stats = pstats.Stats(profile, stream=sys.stdout)\n"
        "stats.sort_stats('tottime').print_stats(30)\n"
        "stats.sort_stats('cumtime').print_stats('seecause', 45)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    lines = [line.replace(str(Path(__file__).parents[1]), "") for line in found.stdout.splitlines()]
    print("\n```", *(line for line in lines if line.strip()), "```", sep="\n", flush=True)


# ---------------------------------------------------------------- many photos


def many(setting: Setting) -> None:
    """`explain` of copies: does memory grow, and what is on the disk?"""
    folder, out = setting.linked("many", setting.copies), setting.place / "explained-many"
    words = ["explain", str(folder), *setting.model_words, "--out", str(out), "--quiet"]
    process = subprocess.Popen(own(*words))
    begun, seen = time.perf_counter(), list[tuple[int, float, float, float]]()
    heading(
        "photos", "seconds", "photos/s since the line above", "MB of the main process", "of all"
    )
    marks = [round(setting.copies * share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)]
    while process.poll() is None:
        time.sleep(0.5)
        seconds = time.perf_counter() - begun
        drafts = list(setting.place.glob(".explained-many.*.partial/images"))
        done = sum(1 for _ in os.scandir(drafts[0])) if drafts else 0
        if marks and done >= marks[0]:
            marks.pop(0)
            before = seen[-1] if seen else (0, 0.0, 0.0, 0.0)
            speed = (done - before[0]) / (seconds - before[1])
            pids = [process.pid, *children(process.pid)]
            own_bytes, shared = memory(process.pid, "Rss"), sum(memory(pid, "Pss") for pid in pids)
            seen.append((done, seconds, own_bytes, shared))
            row(done, f"{seconds:.1f}", f"{speed:.0f}", f"{own_bytes:.0f}", f"{shared:.0f}")
        if seconds > setting.patience:
            below = children(process.pid)
            process.send_signal(2)
            process.wait()
            deadline = time.perf_counter() + 20
            while any(map(is_running, below)) and time.perf_counter() < deadline:
                time.sleep(0.1)
            left = list(filter(is_running, below))
            print(f"\nstopped by Ctrl-C after {seconds:.0f} s, {done} photos; workers left: {left}")
            return
    seconds = time.perf_counter() - begun
    print(f"\n{setting.copies} photos in {seconds:.1f} s, exit code {process.returncode}", end="; ")
    if seen:
        print(f"memory {seen[-1][2] / seen[0][2] - 1:+.1%}, {seen[-1][3] / seen[0][3] - 1:+.1%}")
    print(page_size(out, setting.copies))
    opened(out)


def is_running(pid: int) -> bool:
    """Whether a process has not ended; nobody may have asked yet how it ended."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    """All processes below a process."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    below = [int(child) for child in file.read_text().split()] if file.exists() else []
    return [*below, *(grandchild for child in below for grandchild in children(child))]


def memory(pid: int, kind: str) -> float:
    """Megabytes of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{kind}:")), 0.0)


def page(setting: Setting) -> None:
    """The writer alone: explanations of some photos, written over and over."""
    from seecause.report.explain import write_explanations

    out, count = setting.place / "written", setting.copies
    out.mkdir()
    some = setting.files[: batch_size(setting.model)]
    found = next(iter(explain_batches(setting.model, some, batch=len(some))))
    marks: list[tuple[int, float]] = []

    def parts() -> Iterator[Any]:
        for start in range(0, count, len(some)):
            rows = min(len(some), count - start)
            part = found
            if rows < len(some):
                runs = {name: each[list(range(rows))] for name, each in found.runs.items()}
                part = replace(found, runs=runs, names=found.names[:rows])
            places = list(range(start, start + rows))
            if start * 4 // count > len(marks) - 1:
                marks.append((start, memory(os.getpid(), "Rss")))
            yield replace(part, places=places)

    with timed() as cost:
        write_explanations(out, parts(), [str(place) for place in range(count)])
    print(f"writer alone: {count} photos, {cost} s, {cost.processor / count * 1e3:.2f} ms a photo;")
    print("MB after photos:", ", ".join(f"{done}: {held:.0f}" for done, held in marks))
    print(page_size(out, count))
    opened(out)


def opened(folder: Path) -> None:
    """Seconds until the page shows its first thumbnails, and what it read by then."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return
    if not CHROMIUM.exists():
        return
    with sync_playwright() as playwright:
        arguments = ["--headless", "--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        tab, read = browser.new_page(), list[str]()
        tab.on("requestfinished", lambda request: read.append(request.url))
        begun = time.perf_counter()
        tab.goto((folder / "index.html").absolute().as_uri(), wait_until="load")
        tab.wait_for_function("[...document.images].some(i => i.complete && i.naturalWidth)")
        seconds = time.perf_counter() - begun
        tab.wait_for_timeout(300)
        files = [Path(url.removeprefix("file://").partition("?")[0]) for url in {*read}]
        size = sum(file.stat().st_size for file in files if file.is_file())
        print(f"opened: first thumbnails after {seconds:.2f} s, {size / 2**20:.1f} MB read")
        browser.close()


# ---------------------------------------------------------------- single calls


def calls(setting: Setting) -> None:
    """`sc.attribute` of one image, repeated."""
    import timm

    from seecause.attribution.caap import caap, make_plan, sweep
    from seecause.attribution.mosaic import mosaic
    from seecause.engine import graphs
    from seecause.engine.sweep import selection
    from seecause.engine.trace import blank_image
    from seecause.loading import wrap
    from seecause.target import Target

    where = setting.model.device
    dtype = usual_dtype(where)
    heading("model", "contender", "ms", "x its arithmetic", "spread")
    for size in setting.sizes:
        with where:
            module = timm.create_model(SIZES[size], num_classes=1000).to(dtype).eval()
        model: Any = wrap(module, name=size)
        images = 2 * torch.rand(1, 3, 224, 224, device=where, dtype=dtype) - 1
        target = Target(torch.zeros(1, dtype=torch.long, device=where))
        layout = model.check(images)
        plan = make_plan(model, layout, tail=None, layers=None)
        blank = blank_image(model, (224, 224))

        def inside(call: Callable[[], object], model: Any = model) -> object:
            with model.eval_mode(frozen=True), torch.no_grad():
                return call()

        forward = partial(graphs.captured, model, "plain", lambda: module, images)  # noqa: B023
        chosen = selection(layout.grid)
        runs = {
            "plain forward": partial(inside, forward),
            "sweep": partial(inside, partial(sweep, model, images, blank, chosen, plan)),
            "caap": partial(inside, partial(caap, model, images, target)),
            "sc.attribute, caap": partial(attribute, model, images, 0),
            "mosaic": partial(inside, partial(mosaic, model, images, target)),
            "sc.attribute, mosaic": partial(attribute, model, images, 0, "mosaic"),
        }
        arithmetic = {"caap": "sweep", "sc.attribute, caap": "sweep"}
        arithmetic["sc.attribute, mosaic"] = "mosaic"
        timings = race(runs, where, warm_ups=4, repeats=15 if where.type == "cuda" else 3)
        for name, timing in timings.items():
            ratio = timing.seconds / timings[arithmetic.get(name, name)].seconds
            row(size, name, f"{timing.seconds * 1e3:.2f}", f"{ratio:.2f}", f"{timing.spread:.0%}")
        if setting.profile:
            seen = cProfile.Profile()
            for _ in range(50):
                seen.runcall(attribute, model, images, 0)
            pstats.Stats(seen).sort_stats("tottime").print_stats(40)
        graphs.clear()


def lvlm(setting: Setting) -> None:
    """Derivatives of the first and the second image, in two processes."""
    print(f"{setting.shape}, random weights, bfloat16 on a GPU; set-up is prompt, prefix and banks")
    heading(
        *("process", "weights", "two banked prompts", "first image: set-up", "64 derivatives"),
        *("second image: set-up", "64 derivatives", "both", "first less second"),
    )
    with tempfile.TemporaryDirectory() as cache:
        for process in ("first", "second"):
            done = subprocess.run(
                [sys.executable, __file__, "--derivatives-of", setting.shape,
                 *(["--profile"] if setting.profile and process == "second" else [])],
                check=True, capture_output=True, text=True,
                env={**os.environ, "TRITON_CACHE_DIR": cache},
            )  # fmt: skip
            *lines, last = done.stdout.splitlines()
            times = json.loads(last)
            second = times["second set-up"] + times["second derivatives"]
            more = times["first set-up"] + times["first derivatives"] - second
            cells = [f"{seconds:.3f}" for seconds in (*times.values(), second, more)]
            row(process, *cells)
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)


def derivatives(shape: str, profile: bool) -> None:
    """Seconds of two images of one process, as JSON."""
    from benchmarks.lvlm_shapes import SHAPES
    from benchmarks.timing import clock
    from seecause.lvlm import MaskEngine, attribute_heads, wrap
    from seecause.lvlm.bank import bank_of_prompts

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def build() -> Any:
        module, inputs = SHAPES[shape](where, usual_dtype(where))
        return wrap(module, name=shape, check=False), inputs

    (model, inputs), built = clock(build, where)

    def prompts() -> Any:
        return bank_of_prompts(model, [model.read(inputs(seed)) for seed in (1, 2)])

    bank, banked = clock(prompts, where)
    times = {"weights": built, "bank": banked}

    def both(seed: int) -> tuple[float, float]:
        engine, ready = clock(
            lambda: MaskEngine(model, model.read(inputs(seed)), None, bank, floor=None), where
        )
        return ready, clock(lambda: attribute_heads(engine), where)[1]

    times["first set-up"], times["first derivatives"] = both(3)
    found = sorted((both(4 + turn) for turn in range(REPEATED)), key=sum)[REPEATED // 2 :]
    if profile:
        seen = cProfile.Profile()
        seen.runcall(both, 4 + REPEATED)
        pstats.Stats(seen).sort_stats("cumtime").print_stats(70)
    times["second set-up"], times["second derivatives"] = found[0]
    print(json.dumps(times))


# ---------------------------------------------------------------- all of them


def main(
    *words: str,
    sections: str = SECTIONS,
    images: int = 500,
    copies: int = 20_000,
    workers: str = "",
    model: str = VIT_TINY,
    weights: str | None = None,
    input: str = "mean=0.5,0.5,0.5;std=0.5,0.5,0.5",
    sizes: str = "ViT-B/16,ViT-L/16",
    shape: str = "llava-1.5-7b",
    patience: float = 200.0,
    profile: bool = False,
    count: bool = False,
    derivatives_of: str | None = None,
) -> None:
    """Measure the chosen sections and print each as it is done.

    Args:
        words: The folder of photos.
        input: How photos are prepared, as --input of the commands, with ; between them.
        workers: Numbers of loader workers of `explain`. Default: as many as its own default.
        patience: Seconds after which `many` is stopped by Ctrl-C.
        count: Run the words as a command, and print the plain forwards in it.
        derivatives_of: Run one process of section lvlm.
    """
    if count:
        return count_forwards(words)
    if derivatives_of is not None:
        return derivatives(derivatives_of, profile)
    from seecause.data.dataset import default_workers

    prepared = [text for text in input.split(";") if text]
    model_words = ["--model", model, *(["--weights", weights] if weights else [])]
    model_words += [word for text in prepared for word in ("--input", text)]
    counts = [int(word) for word in (workers or str(default_workers(images))).split(",")]
    steps: dict[str, Callable[[Setting], None]] = {
        "explain": explained,
        **{kind: partial(dataset_command, kind=kind) for kind in DATASET},
        **{"lvlm": lvlm, "calls": calls, "page": page, "many": many},
    }
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not os.environ.get("PYTHONPYCACHEPREFIX"):  # libraries may lie in a read-only folder
            os.environ["PYTHONPYCACHEPREFIX"] = str(place / "compiled")
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            warm = ["--out", str(place / "warm"), "--quiet"]
            subprocess.run(own("explain", "critters:clean:test#0", *warm), check=True)
        reading = Reading(weights=weights, input=prepared)
        setting = Setting(
            Path(words[0]), model_words, model, reading, images, copies, counts,
            sizes.split(","), shape, patience, profile, place,
        )  # fmt: skip
        cores = f"{os.cpu_count()} cores"
        title(setting.model.device, cores, "seconds of the clock, of processors")
        for name in sections.split(","):
            begun = time.perf_counter()
            print(f"\n## {name}\n", flush=True)
            try:
                steps[name](setting)
            except Exception as failure:  # the other sections are measured all the same
                traceback.print_exc()
                print(f"FAILED: {failure}", getattr(failure, "stderr", "") or "")
            print(f"\n({name}: {time.perf_counter() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    cyclopts.run(main)
