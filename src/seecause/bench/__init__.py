"""Methods x images x metrics on one model, in pieces that survive a power cut.

plan      what is asked -> shards, each named by a digest of everything that decides its result
inputs    the bytes of the samples, and the code, that a shard depends on
options   names and kinds of options, checked before anything runs
measures  the metrics, by groups that share their work, and what each needs
ablate    CAAP with one setting changed at a time, as methods of a run
depth     where the class token looks, block by block
work      one shard: read, attribute, measure
store     the run folder: finished shards, the log, the manifest
runner    what is still to do, in this process or in several
table     means, errors, intervals and paired differences; CSV and LaTeX
"""
