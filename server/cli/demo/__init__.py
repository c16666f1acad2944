"""`demo`: a model learns from a stream while two nodes serve it and share its buckets out anew.

`command` is what the user calls; `run` goes through the stages; `fleet` starts the processes that
serve; `reshard` moves buckets under traffic; `proof` and `report` say what came of it: `figures` in
words, and `charts`.
"""
