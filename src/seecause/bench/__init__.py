"""Methods x images x metrics on one model, in pieces that survive a power cut.

    request = sc.bench.Request("builtin:critters-vit", "critters:clean:test",
                               methods={"caap": {}, "rollout": {}}, metrics=("paper",), limit=64)
    sc.bench.run("runs/first", request).complete
    sc.bench.table("runs/first").cells["caap"]["ins-del"].mean

store     finished work in a folder, by id, with checksums: the resume store of the package
plan      what is asked -> shards, each named by a digest of everything that decides its result
measures  the metrics, by groups that share their work; options, checked before anything runs
evaluate  one shard: read, attribute, measure
workers   pools of workers: this process, or others (cluster: processes, Ray)
runner    what is still to do of a run
pieces    audits, head scores and discoveries in pieces that are kept, done by the same workers
results   the numbers of a run, read from its shards in one pass
tables    means, errors, intervals and paired differences; CSV, LaTeX and Markdown
"""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
