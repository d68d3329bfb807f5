"""Every error a user can cause: what was expected, what came, what to do.

The command line prints them as one line and leaves with exit code 2.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

SHOWN = 30  # names in a list


def printable(text: str) -> str:
    """A text for a terminal, in one line: what would move the cursor, turn the direction of writing
    or cannot be written is spelled out. Names of files may hold anything.

    >>> printable("cat\\x1b[2J.png")
    'cat\\\\x1b[2J.png'
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class SeecauseError(Exception):
    """Base of all errors this package raises on purpose. They cross processes: a copy has the
    class, the message and the attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(
    kind: type[SeecauseError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> SeecauseError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class BadOption(SeecauseError):
    """An option has a value that cannot be used."""

    def __init__(self, name: str, got: object, expected: str):
        value = f"{name} is not set" if got is None else f"{name}={got!r} cannot be used"
        super().__init__(f"{value}; expected {expected}.")
        self.option = name


class NeedlessOption(BadOption):
    """An option that has no meaning here: no value of it can be used."""

    def __init__(self, name: str, got: object, reason: str):
        SeecauseError.__init__(self, f"{name}={got!r} cannot be used: {reason}. Leave it out.")
        self.option = name


class UnknownName(SeecauseError):
    """A method, model or other named thing does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        known = sorted(known)
        near = nearest(name, known)
        listed = ", ".join(known[:SHOWN])
        if len(known) > SHOWN:  # with a name that may be meant, thirty others are noise
            listed = f"{len(known)} names" if near else f"{listed}, ... ({len(known)} in all)"
        super().__init__(
            f"no {kind} is called {name!r}; nearest: {', '.join(near) or 'none close'}. Known:"
            f" {listed}."
        )


class UnknownDataset(UnknownName):
    """A dataset of a kind that does not exist, or of which only the kind is named."""

    def __init__(self, spec: str, forms: Sequence[str]):
        kinds = {form.partition(":")[0]: form for form in forms}  # such as pets: pets:PATH[:SPLIT]
        near = [kinds[kind] for kind in nearest(spec.partition(":")[0], kinds)]
        others = "docs/data.md lists all" if near else f"other kinds: {', '.join(kinds)}"
        SeecauseError.__init__(
            self,
            f"no dataset is called {spec!r}; nearest: {', '.join(near) or 'none close'}. A folder"
            f" of your own pictures is folder:PATH; {others}.",
        )


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Up to three of the names that may have been meant: first those that hold what was typed.

    >>> nearest("persian", ["pelican", "Persian cat", "tabby"], cutoff=0.5)
    ['Persian cat', 'pelican']
    """
    folded = {other.casefold(): other for other in known}
    typed = name.casefold()
    holding = sorted((other for other in folded if typed and typed in other), key=len)
    alike = difflib.get_close_matches(typed, folded, n=3, cutoff=cutoff)
    return [folded[other] for other in dict.fromkeys([*holding, *alike])][:3]


class UnknownClass(SeecauseError):
    """A class name or index that the model does not have."""

    def __init__(self, name: str | int, known: Sequence[str], count: int):
        if isinstance(name, int):
            reason = f"class index {name} is out of range; this model has classes 0-{count - 1}."
        elif not known:
            reason = (
                f"no class is called {name!r}: this model carries no class names. Give an index"
                f" (0-{count - 1}), or name the classes: classes=[...] (--classes FILE)."
            )
        else:
            near = ", ".join(nearest(name, known, cutoff=0.5)) or "none close"
            reason = (
                f"no class is called {name!r}; nearest: {near}. Give an index (0-{count - 1}) or"
                " see `seecause doctor --model MODEL --list-classes`."
            )
        super().__init__(reason)


class OtherClasses(UnknownClass):
    """A dataset with a class that the model does not have."""

    def __init__(self, data: str, model: str, name: str, known: Sequence[str]):
        few = ", ".join(map(repr, known[:3])) + (
            f", ... ({len(known)} in all)" if len(known) > 3 else ""
        )
        wordnet = re.fullmatch(r"n\d{8}", name) is not None
        ids = " Folders with ImageNet's ids are read by imagenet:PATH." if wordnet else ""
        SeecauseError.__init__(
            self,
            f"{data} is not data for {model}: no class is called {name!r} there, its classes are"
            f" {few}.{ids} Call folders as `seecause doctor --model MODEL --weights FILE"
            " --list-classes` does, give names with --classes FILE, or take another model.",
        )


class UnsupportedModel(SeecauseError):
    """No adapter fits this module, or a part of it cannot be split exactly."""

    def __init__(
        self, what: str, reason: str, remedy: str = "see docs/models.md for the families that work"
    ):
        super().__init__(f"{what} is not supported: {reason}; {remedy}.")


class NoClassifier(UnsupportedModel):
    """A vision-language model where a classifier is expected."""

    def __init__(self, what: str):
        super().__init__(
            what,
            "this is a vision-language model, not a classifier",
            "use sc.lvlm.load, or `seecause lvlm heads | tokens | study`",
        )


class ViewMismatch(SeecauseError):
    """The view of a model does not compute what the model computes."""

    def __init__(
        self,
        probe: str,
        where: str,
        reason: str,
        remedy: str = "Check mean/std/size/pool/head, or report the model class",
    ):
        self.probe, self.where = probe, where
        super().__init__(
            f"the view does not match the model: probe {probe!r} failed at {where}: {reason}."
            f" No map would be trustworthy, so the wrap is refused. {remedy}."
        )


class NotDefined(SeecauseError):
    """The method has no meaning for this model or readout."""

    def __init__(self, method: str, reason: str, remedy: str):
        super().__init__(f"{method} is not defined here: {reason}. {remedy}.")


class BadImage(SeecauseError):
    """A file or tensor that cannot be used as an image."""

    def __init__(
        self,
        what: str,
        reason: str,
        remedy: str = "give an RGB, grey, CMYK or palette image of at least 2 x 2 pixels",
    ):
        super().__init__(f"{what}: {reason}; {remedy}.")


class DataMissing(SeecauseError):
    """A file or folder of a dataset is not there, or is not what the dataset's release has in its
    place."""

    def __init__(self, what: str, reason: str, remedy: str):
        super().__init__(f"{what}: {reason}; {remedy}.")


class MissingExtra(SeecauseError):
    """An optional library is not installed; it comes with an extra, or by its own name."""

    def __init__(self, library: str, extra: str = ""):
        package = f"'seecause[{extra}]'" if extra else library
        super().__init__(f"{library} is not installed; run: pip install {package}.")


class MissingWeights(SeecauseError):
    """Weights that were asked for cannot be had."""

    def __init__(self, what: str, reason: str, remedy: str):
        super().__init__(f"no weights for {what}: {reason}. {remedy}.")
        self.reason = reason


class BadPrompt(SeecauseError):
    """A picture and a question from which no usable sequence can be made."""

    def __init__(self, what: str, reason: str, remedy: str):
        super().__init__(f"{what}: {reason}; {remedy}.")


class BankMismatch(SeecauseError):
    """A bank of average pictures that does not fit the model or the picture."""

    def __init__(self, what: str, reason: str, remedy: str):
        super().__init__(f"{what} cannot stand in for this picture: {reason}; {remedy}.")


class WeakAnswer(SeecauseError):
    """The picture hardly moves the answer, so there is nothing to share out among heads."""

    def __init__(self, answer: str, moved: float, floor: float):
        expected = f"at least floor={floor:g}" if floor else "more than 0"
        super().__init__(
            f"the picture moves the logit of {answer!r} by {moved:.3g} only; expected {expected}."
            " Shares of so little are noise: ask a question that needs the picture, name another"
            " answer, or lower floor."
        )


class NothingRight(SeecauseError):
    """A method that starts from right answers has none to start from."""

    def __init__(self, what: str):
        super().__init__(
            f"the model answers {what} right; this method starts from right answers. Check that"
            " model and data have the same classes, or give more photos."
        )


class Diverged(SeecauseError):
    """A training run whose loss or weights are no numbers any more."""

    def __init__(self, step: int, reason: str):
        super().__init__(
            f"{reason} at step {step}; expected numbers. Lower learning_rate, or head_factor, or"
            " use precision='float32', in a new folder; the last snapshot, if there is one, is from"
            " before and holds numbers only."
        )
