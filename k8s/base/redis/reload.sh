# Redis reads users and certificates once. This has it read them again when their secrets have changed, and
# at the start: they may have changed just then.
trap 'exit 143' TERM
users=/etc/redis-users tls=/etc/redis-tls pause=${1:-10}

sum() { cat $users/* $tls/* | cksum; }
ask() { redis-cli --tls --insecure --user reload "$@" 2>&1; } # of this pod: nobody is between
load() {
  said=$(ask config set tls-cert-file $tls/tls.crt tls-key-file $tls/tls.key tls-ca-cert-file $tls/ca.crt)
  [ "$said" = OK ] && said=$(ask acl load) && [ "$said" = OK ]
}

known=$(cat $users/reload) seen=
export REDISCLI_AUTH
while sleep "$pause" & wait $!; do
  now=$(sum)
  [ "$now" = "$seen" ] && continue
  # Redis knows the password that it has read last: the old one, or the new one if it was restarted.
  for REDISCLI_AUTH in "$known" "$(cat $users/reload)"; do
    if load; then
      seen=$now known=$(cat $users/reload)
      echo "users and certificates have been read"
      break
    fi
  done
  [ "$now" = "$seen" ] || echo "users and certificates could not be read: $said"
done
