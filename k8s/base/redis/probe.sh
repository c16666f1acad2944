# The user `probe` may ping and no more, and needs no password.
REDISCLI_AUTH=none redis-cli --tls --insecure --user probe ping | grep -q PONG
