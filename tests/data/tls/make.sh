#!/bin/sh
# Makes the certificates of the TLS tests anew: two ends of one authority, and an end of another.
set -e
cd "$(dirname "$0")"
authority() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 \
        -subj "/CN=$1" -keyout "$1.key" -out "$1.pem"
}
end() {
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$2" \
        -keyout "$2.key" -out "$2.csr"
    openssl x509 -req -days 36500 -in "$2.csr" -CA "$1.pem" -CAkey "$1.key" -set_serial "$3" -out "$2.pem"
}
authority cluster
end cluster gateway 1
end cluster worker 2
authority elsewhere
end elsewhere stranger 3
rm ./*.csr cluster.key elsewhere.key
