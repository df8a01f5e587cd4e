"""What listens to a run (see the table in run.py): each has those of `restore`, `state`, `on_step`, `on_event`,
`on_log` and `close` that it needs; and what a run reports of itself."""
