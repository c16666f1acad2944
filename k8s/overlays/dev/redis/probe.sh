redis-cli ping | grep -q PONG
