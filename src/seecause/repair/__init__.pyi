from seecause.repair._gate import Check as Check, Gate as Gate, gate as gate
from seecause.repair._remedies import (
    Lesson as Lesson,
    Mended as Mended,
    remedies as remedies,
    remedy as remedy,
)
from seecause.repair.audit import BackgroundAudit as BackgroundAudit, verdict_of as verdict_of
from seecause.repair.discover import Discovery as Discovery, Finding as Finding
from seecause.repair.eye import Eye as Eye, EyeMasks as EyeMasks, otsu as otsu
from seecause.repair.last_layer import LastLayer as LastLayer, new_layer as new_layer
from seecause.repair.result import Repair as Repair
from seecause.repair.transplant import (
    Pairs as Pairs,
    Transplants as Transplants,
    pairs_of as pairs_of,
    transplant_pairs as transplant_pairs,
)
