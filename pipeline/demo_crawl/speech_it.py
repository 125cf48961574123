"""Italian sentences for the demo crawl: the language that its recipe does not ask for."""

from pipeline.demo_crawl.speech import Speech

ITALIAN = Speech(
    language="it",
    menu=("Inizio", "Articoli", "Eventi", "Chi siamo", "Contatti"),
    titles=("{cosa}: un racconto", "Tutto su {tema}", "Una giornata {luogo}", "{tema}, ieri e oggi"),
    templates=(
        "{prima} {persona} ha trovato {oggetto} {luogo}.",
        "{persona} ha venduto {oggetto} {prima}.",
        "{spesso} {persona} legge il giornale {luogo}.",
        "{cosa} sembrava {stato} {prima}.",
        "{persona} cercava {oggetto} {luogo} {quando}.",
        "Nessuno sapeva perché {persona} conservasse {oggetto}.",
        "{spesso} {cosa} rimane {stato}.",
        "Con {numero} euro si compra {oggetto} {luogo}.",
        "Si racconta che {persona} abbia perso {oggetto} {prima}.",
        "{quando}, {persona} aspettava {luogo}.",
        "Più tardi {persona} ha portato {oggetto} a casa.",
        "Forse {persona} troverà {oggetto} {luogo}.",
        "Sono passate {numero} ore, e {persona} ha rivisto {oggetto}.",
        "Da {numero} anni {persona} aspetta {luogo} con {oggetto}.",
        "Purtroppo {cosa} era {stato} {prima}.",
        "Con {numero} amici, {persona} ha visitato una mostra su {tema}.",
        "Quando {cosa} è {stato}, {persona} resta a casa.",
        "Secondo {persona}, {cosa} pare {stato}.",
        "Una conferenza su {tema} si è tenuta {prima} {luogo}.",
        "Appena {persona} ha preso {oggetto}, ha cominciato a piovere.",
        "{spesso} {persona} apre la finestra per ascoltare gli uccelli.",
        "Nonostante tutto {persona} ha tenuto {oggetto} per {numero} giorni.",
        "Chi studia {tema} si ritrova {spesso} {luogo}.",
        "Un manifesto su {tema} è rimasto {numero} settimane {luogo}.",
        "Per fortuna {persona} aveva {oggetto} {quando}.",
        "Alla fine tutti sorridevano, perché {cosa} era {stato}.",
        "{persona} ha mostrato {oggetto} ai bambini {luogo}.",
        "Il giornale ha pubblicato {prima} un articolo su {tema}.",
        "{quando}, {persona} ha finalmente trovato {oggetto}.",
        "Dopo {numero} minuti {persona} cercava ancora {oggetto}.",
        "{prima} {persona} ha salutato un vecchio amico {luogo}.",
        "Senza {oggetto}, {persona} non esce mai di casa.",
        "{spesso} vediamo {persona} {luogo} con {oggetto}.",
        "Abbiamo letto {numero} pagine su {tema} {quando}.",
    ),
    phrases={
        "prima": (
            "ieri sera / tre settimane fa / l'estate scorsa / venerdì scorso / una mattina di nebbia / "
            "poco prima di Natale / verso mezzanotte / dopo il temporale / molti anni fa / il primo giorno di scuola"
        ),
        "spesso": (
            "ogni mattina / la domenica / in autunno / la sera / con il bel tempo / ogni tanto / di solito / "
            "nei giorni di festa / d'inverno / dopo il lavoro"
        ),
        "persona": (
            "la fornaia del paese / mia nonna / un vecchio pescatore / la giovane maestra / il nostro vicino / "
            "una giardiniera / il capotreno / uno studente di Padova / la sindaca / mio fratello / l'orologiaio / "
            "una viaggiatrice svizzera / la bibliotecaria / il mugnaio / un postino gentile"
        ),
        "oggetto": (
            "un cesto di mele / la vecchia bicicletta / una teiera di porcellana / la chiave della cantina / "
            "una lunga lettera / la carta dei dintorni / del pane fresco / un libro sugli uccelli / "
            "una scatola di fotografie / un paio di guanti / il giornale di ieri / un mazzo di tulipani / "
            "la ricetta della torta di prugne / una lampada nuova / un ombrello verde"
        ),
        "luogo": (
            "sulla piazza del mercato / dietro la chiesa / in riva al lago / nella piccola bottega / "
            "davanti al municipio / nel giardino del museo / vicino al vecchio mulino / alla fermata del tram / "
            "sul ponte / in una strada tranquilla / sotto i tigli / in cima alla collina / al porto / in cucina"
        ),
        "quando": (
            "mentre pioveva a dirotto / prima che arrivassero gli ospiti / quando il treno era già partito / "
            "appena è tornato il sole / anche se la strada era chiusa / mentre suonavano le campane / "
            "malgrado il freddo di febbraio / nel mezzo della festa / durante il temporale"
        ),
        "stato": (
            "alla portata di tutti / come sempre / in buono stato / meglio del previsto / lontano dal centro / "
            "fuori dal comune / di moda / quasi irriconoscibile / difficile da trovare / davvero interessante"
        ),
        "cosa": (
            "il vecchio ponte / l'orario dei treni / il piccolo caffè / la mostra / il sentiero del lago / "
            "l'acqua della fontana / la zuppa del giorno / la vista dalla torre / il concerto nel parco / la bottega"
        ),
        "tema": (
            "la storia della città / le piante rare / la vita delle api / le mappe antiche / l'arte della cucina / "
            "la costruzione dei violini / i paesi lontani / le stelle d'inverno / la navigazione sul fiume / i libri"
        ),
        "numero": "due / tre / quattro / cinque / sette / otto / dieci / dodici / venti",
    },
)
