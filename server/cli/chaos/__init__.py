"""`chaos`: a real fleet under seeded faults, every answer and its final state checked.

`command` is what the user calls; `faults` draws what goes wrong from a seed; `fleet` starts the
processes and starts them again; `links` stands between them and delays, cuts and corrupts; `inject`
makes a fault happen; `replay` knows from the publication what every version is; `traffic` asks the
nodes and judges the answers; `rounds` runs rounds; `report` says what came of them.
"""
