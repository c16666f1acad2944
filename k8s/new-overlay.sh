#!/bin/sh
# Makes an overlay of your own, with secrets that nobody else has: k8s/new-overlay.sh k8s/overlays/mine
#
# Then look at its kustomization.yaml, and `kubectl apply -k` it. Secrets lie in its folder `secrets`,
# which git ignores there; who can read them is an operator.
set -eu
[ $# -ge 1 ] && [ $# -le 2 ] || {
  echo "usage: $0 FOLDER [REGISTRY]      e.g. $0 k8s/overlays/mine registry.example.org/embertide" >&2
  exit 2
}
folder=$1 registry=${2:-}
[ ! -e "$folder" ] || { echo "$folder is there already: name a new folder" >&2; exit 2; }
command -v openssl >/dev/null || { echo "openssl is not installed; it makes the passwords" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
umask 077
mkdir -p "$folder/secrets"
base=$(realpath --relative-to="$folder" "$here/base")

random() { openssl rand -hex 32; }
password() { cat "$folder/secrets/redis-$1"; }
user() { # NAME RULES: an ACL line with the hash of the password
  echo "user $1 on #$(printf %s "$(password "$1")" | sha256sum | cut -d' ' -f1) $2"
}

for role in operator reader node; do echo "$role:$(random)"; done >"$folder/secrets/tokens"
sed -n 's/^node://p' "$folder/secrets/tokens" >"$folder/secrets/node-token"
for role in control node trainer reload; do random >"$folder/secrets/redis-$role"; done
# The rules are those of docs/security.md. `probe` may ping, `reload` has Redis read this file again.
common="user default off
user probe on nopass +ping
$(user reload '+acl|load +config|set')"
{
  echo "$common"
  user trainer '~e:* +@read +@write +@scripting +@transaction +@connection -@dangerous +info'
  user node '%R~e:* ~e:*:node* +@read +sadd +set +@connection -@dangerous'
  user control '%R~e:* ~e:*:rollback +@read +set +@connection -@dangerous +info'
} >"$folder/secrets/bus.acl"
{
  echo "$common"
  user node '%R~c:* +@read +@connection -@dangerous'
  user control '~c:* +@read +@write +@scripting +@transaction +@connection +time -@dangerous'
} >"$folder/secrets/state.acl"

echo secrets/ >"$folder/.gitignore"
cat >"$folder/kustomization.yaml" <<EOF
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [$base]
# Certificates. Without cert-manager in the cluster leave this out, and make the secrets that it would
# (docs/security.md, Certificates).
components: [$(dirname "$base")/components/cert-manager]
generatorOptions:
  disableNameSuffixHash: true # what changes is read again, and rolls no pod
secretGenerator:
  - {name: embertide-tokens, behavior: replace, files: [secrets/tokens]}
  - {name: embertide-node-token, behavior: replace, files: [token=secrets/node-token]}
  - {name: embertide-redis-users, files: [secrets/bus.acl, secrets/state.acl, reload=secrets/redis-reload]}
  - {name: embertide-redis-control, files: [password=secrets/redis-control]}
  - {name: embertide-redis-node, files: [password=secrets/redis-node]}
  - {name: embertide-redis-trainer, files: [password=secrets/redis-trainer]}
EOF
if [ -n "$registry" ]; then
  echo "images: # and in your copy of train-news.yaml"
  for image in control node; do
    echo "  - {name: embertide/$image, newName: $registry/$image}"
  done
  echo "configMapGenerator: # the trainer's image, which operators' jobs may run; better with its digest"
  echo "  - {name: embertide-training, behavior: replace, literals: [\"trainer=$registry/trainer:0.2.0\"]}"
fi >>"$folder/kustomization.yaml"
echo "$folder is made. Next: kubectl apply -k $folder"
