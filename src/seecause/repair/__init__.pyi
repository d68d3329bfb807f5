from seecause.repair.discover import Discovery as Discovery, Finding as Finding
from seecause.repair.eye import Eye as Eye, EyeMasks as EyeMasks, otsu as otsu
from seecause.repair.pairs import (
    Pairs as Pairs,
    pairs_of as pairs_of,
    transplant_pairs as transplant_pairs,
)
from seecause.repair.transplant import Transplants as Transplants
