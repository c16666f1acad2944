"""The operator's console: pages of a fleet for a browser, by the calls that the commands make.

Their look is that of `embertide.server.pages`.

command.py   `embertide console`: options, and the server until Ctrl-C
server.py    uvicorn, with TLS by the files of a folder
app.py       the routes
doors.py     what every request passes: host, headers, size and origin of a form
sessions.py  who is logged in, each with a token of his own
source.py    what the control plane said last, and how old that is
history.py   the last hour of a few figures
views.py     what pages show, of the facts that `embertide status` has
timeline.py  what happened, in one list
heat.py      reads by buckets and time
actions.py   forms of operators: dry run, preview, confirmation
"""
