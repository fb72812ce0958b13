#!/bin/sh
# A coordinator and three hospitals as four processes on this machine, over TLS, with 5,000 embedded digits.
# Usage: demos/sites.sh FOLDER
set -eu
folder=$1
port=${PORT:-8443}
rm -rf "$folder"
mkdir -p "$folder"
export FEDPPD_SITES="$folder/coordinator" NO_PROXY=127.0.0.1
trap 'kill $processes 2>/dev/null || true' EXIT
processes=""

echo "== an authority for this demo, and three hospitals' rows"
python - "$folder" <<'PYTHON'
import datetime, ipaddress, sys
from pathlib import Path

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedppd_ray.data.datasets import load

folder = Path(sys.argv[1])
key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedppd demo")])
address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
certificate = (
    x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    .not_valid_after(now + datetime.timedelta(days=1)).add_extension(address, critical=False)
    .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(key, hashes.SHA256())
)
pem = serialization.Encoding.PEM
(folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
(folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
train = load("mnist5k", None).train
for index, site in enumerate(("hospital-a", "hospital-b", "hospital-c")):
    # Every third row of the set, which is sorted by digit; one in six of these is kept back.
    mine = np.arange(index, len(train.labels), 3)
    for part, rows in (("rows", mine[np.arange(len(mine)) % 6 > 0]), ("held-out", mine[::6])):
        place = folder / site / part
        place.mkdir(parents=True)
        np.save(place / "images.npy", np.ascontiguousarray(train.images[rows, 0]))
        np.save(place / "labels.npy", np.asarray(train.labels[rows]))
PYTHON

cat > "$folder/sites.yaml" <<'YAML'
name: sites
data: {name: mnist5k, calibration: 400}
federation: {clients: 3, rounds: 3}
client: {epochs: 3, batch_size: 40}
teacher: {rate: 0.12, rate_step: 2, rate_gamma: 0.85}
student: {rate: 0.06}
resources: {start_timeout_s: 300}  # for all three to be there, also on a busy machine
clients:
  client-00: {site: hospital-a}
  client-01: {site: hospital-b}
  client-02: {site: hospital-c}
YAML

echo "== the coordinator listens"
fedppd train "$folder/sites.yaml" --out "$folder/run" --serial --listen "127.0.0.1:$port" \
    --tls-cert "$folder/cert.pem" --tls-key "$folder/key.pem" &
coordinator=$!
processes=$coordinator
until python -c "import socket; socket.create_connection(('127.0.0.1', $port), 1)" 2>/dev/null; do
    kill -0 $coordinator
    sleep 0.5
done

# What a hospital does in its own house: a key and a policy, then the invitation, then work.
hospital() {
    home="$folder/$1/home"
    fedppd site init --home "$home"
    sed -i 's/^figures: false/figures: true/' "$home/policy.yaml"
    fedppd site join "https://127.0.0.1:$port" --name "$1" --code "$2" --ca "$folder/cert.pem" --home "$home"
    exec fedppd site run --home "$home" --data "$folder/$1/rows" --held-out "$folder/$1/held-out" \
        --student "$folder/$1/student" --once
}

for site in hospital-a hospital-b hospital-c; do
    echo "== $site is invited, sets itself up, joins and runs"
    code=$(fedppd sites invite $site)
    hospital $site "$code" &
    processes="$processes $!"
done
wait $processes
processes=""

echo "== what has left hospital-a, and what its student says of a digit and of a letter"
fedppd site show --home "$folder/hospital-a/home"
fedppd data sample mnist5k "$folder/digit.png"
fedppd data sample glyphs "$folder/letter.png" --index 4
FEDPPD_TRUSTED_KEY=$(fedppd keys show) fedppd predict "$folder/hospital-a/student" "$folder/digit.png" "$folder/letter.png"
